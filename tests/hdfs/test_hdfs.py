"""Datasets and exports of the SQL pipeline on HDFS: `make test-hdfs`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hdfs_cluster import Hdfs

from osrdyne.dev.rabbitmq.node_files import free_ports
from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key
from osrdyne_worker import Call, Context, RequestError
from osrdyne_worker.app.errors import DataChangedError
from osrdyne_worker.pipelines import sql as pipeline
from osrdyne_worker.pipelines.queries import export as exporting
from osrdyne_worker.pipelines.queries.export import MANIFEST, ExportRequest
from osrdyne_worker.pipelines.sql import SqlRequest
from osrdyne_worker.spark.files import file_listing
from osrdyne_worker.spark.files.hadoop_files import HadoopFiles

CACHE = Path(__file__).parents[2] / "build" / "hdfs"
COUNT = "select count(*), sum(id) from t"
MakeCall = Callable[..., Call]


@pytest.fixture(scope="module")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hdfs]:
    CACHE.mkdir(parents=True, exist_ok=True)
    cluster = Hdfs(tmp_path_factory.mktemp("hdfs"), cache=CACHE)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def session(hdfs: Hdfs) -> Iterator[Any]:
    conf = {
        "spark.driver.memory": "768m",
        "spark.sql.shuffle.partitions": 2,
        "spark.hadoop.fs.defaultFS": hdfs.address,
        "spark.hadoop.dfs.replication": 1,
        "spark.hadoop.ipc.client.connect.max.retries": 1,
    }
    built = pipeline.sessions.build(
        Context(key=Key("tests"), worker_config={"spark": {"master": "local[2]", "conf": conf}})
    )
    yield built
    pipeline.sessions.close(built)


@pytest.fixture
def make_call(session: Any, hdfs: Hdfs, tmp_path: Path) -> MakeCall:
    def make(path: str, key: str = "k", *, watch: bool = False, **table: Any) -> Call:
        config = {
            "datasets": [{"key": "{name}", "watch": watch, "tables": [{"view": "t", "path": path, **table}]}],
            "export": {"directory": f"{hdfs.address}/exports/{tmp_path.name}", "max_bytes": 1_000_000},
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


@pytest.mark.parametrize("kind", ["url", "path of the default file system", "with a part of the key"])
def test_dataset_is_read_and_cached(session: Any, hdfs: Hdfs, make_call: MakeCall, kind: str) -> None:
    url = written(session, f"{hdfs.address}/data/k/numbers", 10)
    path = {"url": url, "with a part of the key": "/data/{name}/numbers"}.get(kind, "/data/k/numbers")
    call = make_call(path, cache=True)
    assert ask(call) == [[10, 45]]
    assert call.context.state.caching.wait(300)
    assert pipeline.cache_status(call)["views"][0]["cached"]
    assert ask(call) == [[10, 45]]


@pytest.mark.parametrize("base", ["{address}", ""])
def test_missing_data_is_reported_and_found_once_it_is_there(
    session: Any, hdfs: Hdfs, make_call: MakeCall, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{base.format(address=hdfs.address)}/late/{'url' if base else 'path'}"
    call = make_call(path)
    with pytest.raises(RequestError) as caught:
        ask(call)
    assert caught.value.error_code == "dataset_not_found"
    written(session, path, 3)
    monkeypatch.setattr(call.context.state, "_tried_at", float("-inf"))
    assert ask(call) == [[3, 3]]


@pytest.mark.parametrize("base", ["{address}", ""])
def test_files_replaced_below_a_warm_worker_are_opened_again(
    session: Any, hdfs: Hdfs, make_call: MakeCall, base: str
) -> None:
    path = written(session, f"{base.format(address=hdfs.address)}/replaced/{'url' if base else 'path'}", 10)
    call = make_call(path)
    assert ask(call) == [[10, 45]]
    written(session, path, 5)
    # The runtime reloads the data then, and runs the query once more.
    with pytest.raises(DataChangedError):
        ask(call)
    context = replace(call.context, session=session.newSession())
    assert ask(Call(replace(context, state=pipeline.reload_data(context)), Request(key=Key("k"), body=b""))) == [
        [5, 10]
    ]


@pytest.mark.parametrize("base", ["{address}", ""])
def test_changes_of_a_watched_dataset_are_found(
    session: Any, hdfs: Hdfs, make_call: MakeCall, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_listing, "SLICE", 2)
    path = f"{base.format(address=hdfs.address)}/watched/{'url' if base else 'path'}"
    session.range(10).selectExpr("id", "id % 3 as `day é %`").write.partitionBy("day é %").parquet(path)
    call = make_call(path, watch=True)
    version = pipeline.newest_version(call.context)
    context = replace(call.context, data_version=version)
    assert version == pipeline.newest_version(context), "nothing has changed"
    assert ask(Call(context, Request(key=Key("k"), body=b""))) == [[10, 45]]
    files = HadoopFiles(session, f"{hdfs.address}/watched/{'url' if base else 'path'}")
    unfinished = files._java_path("_temporary/0/part-1")
    files._files.create(unfinished, False).close()
    assert version == pipeline.newest_version(context), "a write that has not ended"
    files.delete("_temporary")
    session.range(5).selectExpr("id", "id % 3 as `day é %`").write.partitionBy("day é %").mode("append").parquet(path)
    changed = pipeline.newest_version(context)
    assert changed is not None
    assert version is not None
    assert changed > version
    context = replace(context, session=session.newSession(), data_version=changed)
    context = replace(context, state=pipeline.reload_data(context))
    assert ask(Call(context, Request(key=Key("k"), body=b""))) == [[15, 55]]
    assert changed == pipeline.newest_version(context)
    files.delete("")
    removed = pipeline.newest_version(context)
    assert removed is not None
    assert removed > changed


@pytest.mark.proves("files/file-system-watched-dataset")
def test_listing_that_fails_or_takes_too_long_is_an_error_of_one_line(session: Any, hdfs: Hdfs) -> None:
    [port] = free_ports(1)
    with pytest.raises(file_listing.ListingError, match=f":{port} failed on connection exception") as caught:
        list(file_listing.list_files(session, f"hdfs://127.0.0.1:{port}/data"))
    assert "\n" not in str(caught.value)
    written(session, f"{hdfs.address}/data/listed", 10)
    with pytest.raises(file_listing.ListingError, match="took longer than 1 s"):
        times = iter([0.0, 2.0])
        list(file_listing.list_files(session, f"{hdfs.address}/data/listed", timeout=1.0, monotonic=times.__next__))
    with pytest.raises(FileNotFoundError):
        list(file_listing.list_files(session, f"{hdfs.address}/data/nowhere"))


@pytest.mark.proves("files/file-system-view-cannot")
def test_name_node_that_cannot_be_reached_is_named(session: Any, hdfs: Hdfs, make_call: MakeCall) -> None:
    [port] = free_ports(1)
    with pytest.raises(RequestError) as caught:
        ask(make_call(f"hdfs://127.0.0.1:{port}/data"))
    assert (caught.value.code, caught.value.error_code) == (503, "dataset_unreachable")
    assert f":{port} failed on connection exception" in caught.value.message
    assert "\n" not in caught.value.message
    call = make_call(written(session, f"{hdfs.address}/data/source", 100))
    exports = call.context.state.exports
    config = exports.config.model_copy(update={"directory": f"hdfs://127.0.0.1:{port}/exports"})
    call.context.state.exports = replace(exports, config=config)
    with pytest.raises(RequestError, match=f":{port} failed on connection exception"):
        export(call)


@pytest.mark.parametrize("kind", ["parquet", "csv", "arrow"])
def test_export_is_written_once_with_its_manifest(session: Any, hdfs: Hdfs, make_call: MakeCall, kind: str) -> None:
    call = make_call(written(session, f"{hdfs.address}/data/source", 100))
    first = export(call, format=kind, id="one")
    assert (first["rows"], first["repeated"]) == (100, False)
    assert all(path.startswith(hdfs.address) for path in first["paths"])
    files = HadoopFiles(session, first["paths"][0].rpartition("/data-")[0])
    manifest = json.loads(files.read(MANIFEST) or "")
    assert manifest["paths"] == first["paths"]
    listed = [one for name in files.directories("") for one in files.listed(name)]
    assert (sorted(path for path, _ in listed), sum(size for _, size in listed)) == (first["paths"], first["bytes"])
    if kind != "arrow":
        frame = session.read.options(header=True).format(kind).load(first["paths"])
        assert frame.selectExpr("sum(cast(id as bigint))").collect()[0][0] == 4950
    assert export(call, format=kind, id="one") == {**first, "repeated": True}


def test_of_two_attempts_that_end_together_one_creates_the_manifest(session: Any, hdfs: Hdfs) -> None:
    files = HadoopFiles(session, f"{hdfs.address}/manifests")
    assert files.create("m", b"first", aside="a/m")
    # As if the second one had looked before the first one created it.
    unfinished = files._java_path("b")
    files._files.create(unfinished, False).close()
    assert not files._files.rename(unfinished, files._java_path("m"))
    assert not files.create("m", b"second", aside="c/m")
    assert files.read("m") == "first"


def test_export_above_the_limit_leaves_no_files(
    session: Any, hdfs: Hdfs, make_call: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "SIZE_INTERVAL", 0.05)
    call = make_call(written(session, f"{hdfs.address}/data/source", 100))
    with pytest.raises(RequestError) as caught:
        export(call, "select uuid() from t a join t b join t c", format="csv", id="large")
    assert caught.value.error_code == "export_too_large"
    directory = call.context.state.config.export.directory
    files = HadoopFiles(session, directory)
    assert files.size("") == 0
