"""Datasets and exports of the SQL pipeline on S3: `make test-s3`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from s3_server import BUCKET, S3Server, s3a_jars

from osrdyne.dev.rabbitmq.node_files import free_ports
from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key
from osrdyne_worker import Call, Context, RequestError
from osrdyne_worker.pipelines import sql as pipeline
from osrdyne_worker.pipelines.queries.export import MANIFEST, ExportRequest
from osrdyne_worker.pipelines.sql import SqlRequest
from osrdyne_worker.spark.files.hadoop_files import HadoopFiles

CACHE = Path(__file__).parents[2] / "build" / "s3"
COUNT = "select count(*), sum(id) from t"
ROOT = f"s3a://{BUCKET}"
WRONG_SECRET = "a-wrong-secret-key"
MakeCall = Callable[..., Call]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    CACHE.mkdir(parents=True, exist_ok=True)
    started = S3Server(tmp_path_factory.mktemp("s3"), cache=CACHE)
    try:
        started.start()
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def session(server: S3Server) -> Iterator[Any]:
    [closed] = free_ports(1)
    conf = {
        "spark.driver.memory": "768m",
        "spark.sql.shuffle.partitions": 2,
        "spark.driver.extraClassPath": s3a_jars(CACHE),
        "spark.hadoop.fs.s3a.endpoint": server.address,
        "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
        "spark.hadoop.fs.s3a.path.style.access": "true",
        "spark.hadoop.fs.s3a.access.key": server.access_key,
        "spark.hadoop.fs.s3a.secret.key": server.secret_key,
        # Buckets with faults of their own.
        "spark.hadoop.fs.s3a.bucket.refused.secret.key": WRONG_SECRET,
        "spark.hadoop.fs.s3a.bucket.unknown.access.key": "AKIAUNKNOWN",
        "spark.hadoop.fs.s3a.bucket.unreachable.endpoint": f"http://127.0.0.1:{closed}",
        "spark.hadoop.fs.s3a.bucket.unreachable.attempts.maximum": "1",
        "spark.hadoop.fs.s3a.bucket.unreachable.retry.limit": "1",
        "spark.hadoop.fs.s3a.bucket.unreachable.retry.interval": "10ms",
    }
    built = pipeline.sessions.build(
        Context(key=Key("tests"), worker_config={"spark": {"master": "local[2]", "conf": conf}})
    )
    yield built
    pipeline.sessions.close(built)


@pytest.fixture
def make_call(session: Any, tmp_path: Path) -> MakeCall:
    def make(path: str, key: str = "k", *, watch: bool = False, exports: str = f"{ROOT}/exports", **table: Any) -> Call:
        config = {
            "datasets": [{"key": "{name}", "watch": watch, "tables": [{"view": "t", "path": path, **table}]}],
            "export": {"directory": f"{exports}/{tmp_path.name}", "max_bytes": 1_000_000},
            "paging": {"directory": str(tmp_path / "pages")},
        }
        context = Context(key=Key(key), pool="p", config=config, session=session.newSession())
        return Call(replace(context, state=pipeline.open_data(context)), Request(key=Key(key), body=b""))

    return make


def written(session: Any, path: str, count: int, *, partitions: int = 2) -> str:
    session.range(count, numPartitions=partitions).write.mode("overwrite").parquet(path)
    return path


def ask(call: Call, query: str = COUNT) -> list[list[Any]]:
    rows: list[list[Any]] = json.loads(pipeline.sql(call, SqlRequest(query=query)).body)["rows"]
    return rows


def export(call: Call, query: str = "select id from t order by id", **body: Any) -> dict[str, Any]:
    manifest: dict[str, Any] = pipeline.export(call, ExportRequest(query=query, **body)).body
    return manifest


def reloaded(session: Any, context: Context, version: int | None) -> Context:
    context = replace(context, session=session.newSession(), data_version=version)
    return replace(context, state=pipeline.reload_data(context))


def asked(context: Context) -> list[list[Any]]:
    return ask(Call(context, Request(key=Key("k"), body=b"")))


@pytest.mark.parametrize("path", [f"{ROOT}/data/k/numbers", f"{ROOT}/data/{{name}}/numbers"], ids=["fixed", "of key"])
def test_dataset_is_read_and_cached(session: Any, make_call: MakeCall, path: str) -> None:
    written(session, f"{ROOT}/data/k/numbers", 10)
    call = make_call(path, cache=True)
    assert ask(call) == [[10, 45]]
    assert call.context.state.caching.wait(300)
    assert pipeline.cache_status(call)["views"][0]["cached"]
    assert ask(call) == [[10, 45]]


def test_missing_data_is_reported_and_found_once_it_is_there(
    session: Any, make_call: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = make_call(f"{ROOT}/late")
    with pytest.raises(RequestError) as caught:
        ask(call)
    assert caught.value.error_code == "dataset_not_found"
    written(session, f"{ROOT}/late", 3)
    monkeypatch.setattr(call.context.state, "_tried_at", float("-inf"))
    assert ask(call) == [[3, 3]]


def test_replaced_file_of_a_watched_dataset_is_found(session: Any, make_call: MakeCall) -> None:
    path = f"{ROOT}/watched"
    session.range(10).selectExpr("id", "id % 3 as day").write.partitionBy("day").parquet(path)
    call = make_call(path, watch=True)
    version = pipeline.newest_version(call.context)
    assert version is not None
    context = replace(call.context, data_version=version)
    assert asked(context) == [[10, 45]]
    assert pipeline.newest_version(context) == version, "nothing has changed"
    session.range(5).selectExpr("id", "id % 3 as day").write.partitionBy("day").mode("overwrite").parquet(path)
    changed = pipeline.newest_version(context)
    assert changed is not None
    assert changed > version
    context = reloaded(session, context, changed)
    assert asked(context) == [[5, 10]]
    assert pipeline.newest_version(context) == changed


def test_removed_file_of_a_watched_dataset_is_found(session: Any, make_call: MakeCall) -> None:
    call = make_call(written(session, f"{ROOT}/removed", 10), watch=True)
    version = pipeline.newest_version(call.context)
    assert version is not None
    context = replace(call.context, data_version=version)
    files = HadoopFiles(session, f"{ROOT}/removed")
    removed, _ = files.listed("")[-1]
    files.delete(removed.removeprefix(f"{ROOT}/removed/"))
    changed = pipeline.newest_version(context)
    assert changed is not None
    assert changed > version
    context = reloaded(session, context, changed)
    assert asked(context)[0][0] < 10
    assert pipeline.newest_version(context) == changed


@pytest.mark.parametrize("kind", ["parquet", "csv", "arrow"])
def test_export_is_written_once_with_its_manifest(session: Any, make_call: MakeCall, kind: str) -> None:
    call = make_call(written(session, f"{ROOT}/source", 100))
    first = export(call, format=kind, id="one")
    assert (first["rows"], first["repeated"]) == (100, False)
    assert all(path.startswith(f"{ROOT}/exports/") for path in first["paths"])
    files = HadoopFiles(session, first["paths"][0].rpartition("/data-")[0])
    assert json.loads(files.read(MANIFEST) or "")["paths"] == first["paths"]
    listed = [one for name in files.directories("") for one in files.listed(name)]
    assert (sorted(path for path, _ in listed), sum(size for _, size in listed)) == (first["paths"], first["bytes"])
    if kind != "arrow":
        frame = session.read.options(header=True).format(kind).load(first["paths"])
        assert frame.selectExpr("sum(cast(id as bigint))").collect()[0][0] == 4950
    assert export(call, format=kind, id="one") == {**first, "repeated": True}


FAULTS = {
    "missing bucket": ("nowhere", 404, "The bucket nowhere does not exist"),
    "wrong secret key": ("refused", 503, "spark.hadoop.fs.s3a.secret.key"),
    "unknown access key": ("unknown", 503, "spark.hadoop.fs.s3a.access.key"),
    "no server": ("unreachable", 503, "spark.hadoop.fs.s3a.endpoint"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("watch", [False, True], ids=["not watched", "watched"])
def test_fault_of_a_dataset_names_its_setting(server: S3Server, make_call: MakeCall, fault: str, watch: bool) -> None:
    bucket, code, named = FAULTS[fault]
    with pytest.raises(RequestError) as caught:
        ask(make_call(f"s3a://{bucket}/data", watch=watch))
    assert named in caught.value.message
    assert caught.value.code == code
    assert_is_clean(server, caught.value.message)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_an_export_names_its_setting(session: Any, server: S3Server, make_call: MakeCall, fault: str) -> None:
    bucket, _, named = FAULTS[fault]
    call = make_call(written(session, f"{ROOT}/source", 100), exports=f"s3a://{bucket}/exports")
    with pytest.raises(RequestError) as caught:
        export(call)
    assert named in caught.value.message
    assert_is_clean(server, caught.value.message)


def assert_is_clean(server: S3Server, message: str) -> None:
    assert "\n" not in message
    assert not [secret for secret in (server.secret_key, WRONG_SECRET, server.access_key) if secret in message]
