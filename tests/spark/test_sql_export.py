"""Exports of the SQL pipeline, on a real Spark and the local file system."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from asking import one_table

from osrdyne.errors import ConfigurationError
from osrdyne.protocol.data_versions import DATA_VERSION_HEADER
from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key
from osrdyne_worker import Call, RequestError
from osrdyne_worker.app.errors import CallCancelledError
from osrdyne_worker.pipelines import sql as pipeline
from osrdyne_worker.pipelines.queries.export import MANIFEST, ExportRequest
from osrdyne_worker.pipelines.views.datasets import parse_config
from osrdyne_worker.spark.files.hadoop_files import HadoopFiles
from osrdyne_worker.spark.jobs import progress_of

KEY = Key("tpch/sf=0.001")
QUERY = "select n_nationkey, n_name, n_comment from nation order by n_name"


@pytest.fixture
def target(tmp_path):
    return tmp_path / "exports"


@pytest.fixture
def make(make_call, tpch_config, tmp_path, target):
    def build(**export):
        config = {"directory": str(target), **export}
        return make_call({**tpch_config, "export": config, "paging": {"directory": str(tmp_path / "pages")}}, KEY)

    return build


@pytest.fixture
def call(make):
    return make()


def sent(call: Call, correlation_id: str | None = None, reply_to: str | None = "replies") -> Call:
    """Another request to the same worker."""
    return Call(call.context, Request(key=KEY, body=b"", correlation_id=correlation_id, reply_to=reply_to))


def export(call: Call, query: str = QUERY, **body: Any) -> dict[str, Any]:
    manifest: dict[str, Any] = pipeline.export(call, ExportRequest(query=query, **body)).body
    return manifest


def refusal(call: Call, query: str = QUERY, **body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        export(call, query, **body)
    return caught.value


def local(path: str) -> Path:
    return Path(path.removeprefix("file:"))


def files(target: Path) -> list[Path]:
    """The data files below the directory."""
    return [path for path in target.rglob("*") if path.is_file() and not path.name.startswith((".", "_"))]


def rows(manifest: dict[str, Any]) -> list[tuple[str, ...]]:
    """The rows of an export as text."""
    found: list[tuple[str, ...]] = []
    for path in map(local, manifest["paths"]):
        if manifest["format"] == "csv":
            with path.open(newline="") as file:
                found += [tuple(row) for row in list(csv.reader(file))[1:]]
        else:
            table = pq.read_table(path) if manifest["format"] == "parquet" else pa.ipc.open_file(path).read_all()
            found += [tuple(map(str, row)) for row in zip(*(c.to_pylist() for c in table.columns), strict=True)]
    return found


@pytest.mark.parametrize("kind", ["parquet", "csv", "arrow"])
def test_export_has_the_rows_of_the_query_in_files_of_its_directory(call, target, kind):
    manifest = export(call, format=kind)
    expected = json.loads(pipeline.sql(call, pipeline.SqlRequest(query=QUERY)).body)
    assert rows(manifest) == [tuple(map(str, row)) for row in expected["rows"]]
    assert (manifest["rows"], manifest["columns"]) == (25, expected["columns"])
    assert [local(path) for path in manifest["paths"]] == sorted(files(target))
    assert manifest["bytes"] == sum(path.stat().st_size for path in files(target))
    assert (manifest["repeated"], manifest["key"]) == (False, KEY)
    empty = export(call, f"select * from ({QUERY}) where n_name = 'x'", format=kind)
    assert (empty["rows"], rows(empty)) == (0, [])


def test_values_in_csv_are_exact(call):
    texts = ["' x '", "'a,b'", "'say \"hi\"'", "'back\\\\slash'", "'two\\nlines'", "''", "null", "'é🚄'"]
    manifest = export(call, f"select {', '.join(f'{text} as c{at}' for at, text in enumerate(texts))}", format="csv")
    assert rows(manifest) == [(" x ", "a,b", 'say "hi"', "back\\slash", "two\nlines", "", "", "é🚄")]
    query = "select timestamp '2024-02-29 12:00:00.000001Z' as a, timestamp_ntz '2024-02-29 12:00:00' as b, 1.50BD as c"
    assert rows(export(call, query, format="csv")) == [
        ("2024-02-29T12:00:00.000001Z", "2024-02-29T12:00:00.000000", "1.50")
    ]


def test_limit_and_parameters_hold_for_exports(call):
    query = "select n_nationkey from nation where n_nationkey >= :least order by 1"
    for kind in ("parquet", "arrow"):
        assert rows(export(call, query, parameters={"least": 5}, limit=2, format=kind)) == [("5",), ("6",)]


@pytest.mark.proves("spark/worker-killed-export-reply")
def test_repeated_request_finds_its_first_export(call, target, monkeypatch):
    """The worker died after the manifest was there and before its reply: the request is delivered again."""
    first = export(sent(call, "c1"))
    monkeypatch.setattr("osrdyne_worker.pipelines.queries.export.Exports._write", None)  # nothing can be written again
    assert export(sent(call, "c1")) == {**first, "repeated": True}
    assert len(list(target.rglob(MANIFEST))) == 1


def test_request_with_an_id_is_exported_once_and_different_requests_each(call, target):
    first = export(sent(call, "c1"), id="nightly 2024-02-29")
    assert export(sent(call, "c2", "other"), id="nightly 2024-02-29") == {**first, "repeated": True}
    assert not export(sent(call, "c1"), id="nightly 2024-03-01")["repeated"]
    for correlation_id, reply_to in (("c1", "r1"), ("c2", "r1"), ("c1", "r2"), (None, None), (None, None)):
        assert not export(sent(call, correlation_id, reply_to))["repeated"]
    assert not export(sent(call, "c1", "r1"), QUERY + " desc")["repeated"]
    assert len(list(target.rglob(MANIFEST))) == 8


@pytest.mark.parametrize("step", ["create", "upload", "listed"])
@pytest.mark.proves("spark/worker-killed-exports")
def test_export_of_a_killed_worker_is_not_finished_and_is_written_anew(call, target, monkeypatch, step):
    class KilledError(BaseException):
        pass

    def killed(*arguments, **named):
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(HadoopFiles, step, killed)
        patch.setattr(HadoopFiles, "delete", killed)  # a process that was killed cleans up nothing
        with pytest.raises(KilledError):
            export(sent(call, "c1"), format="arrow")
    assert list(target.rglob(MANIFEST)) == []
    left = files(target)
    assert bool(left) == (step != "upload")
    manifest = export(sent(call, "c1"), format="arrow")
    assert (manifest["rows"], manifest["repeated"]) == (25, False)
    assert [local(path) for path in manifest["paths"]] == files(target)
    assert not any(path.exists() for path in left)


@pytest.mark.proves("spark/two-workers-write-same")
def test_attempt_that_is_overtaken_answers_the_other_export(call, target, monkeypatch):
    """The request was delivered again while its first worker, which lost its connection, still wrote."""
    create = HadoopFiles.create
    other: list[dict[str, Any]] = []

    def overtaken(files, *arguments, **named):
        if not other:
            other.append({})
            other[0] = export(sent(call, "c1"))
        return create(files, *arguments, **named)

    monkeypatch.setattr(HadoopFiles, "create", overtaken)
    mine = export(sent(call, "c1"))
    assert mine == {**other[0], "repeated": True}
    assert [local(path) for path in mine["paths"]] == files(target)


@pytest.mark.proves("spark/export-larger-export-max")
def test_export_above_the_limit_leaves_nothing(make, target, monkeypatch):
    for kind in ("parquet", "csv", "arrow"):
        error = refusal(make(max_bytes=100), format=kind)
        assert (error.code, error.error_code) == (413, "export_too_large")
    monkeypatch.setattr("osrdyne_worker.pipelines.queries.export.Exports._write", None)  # refused by an estimate
    assert refusal(make(max_bytes=1000), "select * from lineitem").error_code == "export_too_large"
    assert files(target) == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_export_above_the_limit_is_cancelled_while_it_is_written(make, spark, target, monkeypatch, kind):
    """1,000 tasks would write about 4 GB."""
    monkeypatch.setattr("osrdyne_worker.pipelines.queries.export.SIZE_INTERVAL", 0.05)
    query = "select id, repeat(cast(uuid() as string), 100) as text from range(0, 1000000, 1, 1000)"
    group = f"too large {kind}"
    call = make(max_bytes=10_000)
    spark.sparkContext.setJobGroup(group, group)
    try:
        error = refusal(call, query, format=kind)
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
    assert error.error_code == "export_too_large"
    assert progress_of(spark, group)["tasks_done"] < 1000
    assert files(target) == []


def test_of_attempts_at_the_same_moment_one_succeeds(spark, target, monkeypatch):
    one, two = HadoopFiles(spark, str(target)), HadoopFiles(spark, str(target))
    assert one.create("export/manifest", b"one", aside="export/data-1/manifest")

    class Blind:
        """The file system as the other attempt saw it, a moment before."""

        def __init__(self, files: Any) -> None:
            self._files = files

        def __getattr__(self, name: str) -> Any:
            return getattr(self._files, name)

        def exists(self, path: Any) -> bool:
            return False

    monkeypatch.setattr(two, "_files", Blind(two._files))
    assert not two.create("export/manifest", b"two", aside="export/data-2/manifest")
    assert one.read("export/manifest") == "one"


def test_answer_names_the_version_of_the_data_that_was_exported(call):
    def answered(version):
        context = replace(call.context, data_version=version)
        request = Request(key=KEY, body=b"", correlation_id="c", reply_to="r")
        answer = pipeline.export(Call(context, request), ExportRequest(query=QUERY))
        return answer.headers[DATA_VERSION_HEADER], answer.body["data_version"]

    assert answered(7) == (7, 7)
    assert answered(8) == (7, 7), "found again: its rows are those of version 7"


def test_failed_or_refused_export_leaves_nothing(call, target):
    assert refusal(call, "select * from csv.`/etc/passwd`").error_code == "table_not_allowed"
    assert refusal(call, "insert overwrite directory '/tmp/x' select 1").code == 403
    assert refusal(call, "select 1 / (n_nationkey - 24) as x from nation").error_code == "DIVIDE_BY_ZERO"
    assert refusal(call, "select array(n_name) as names from nation", format="csv").code == 400
    assert refusal(call, "select 1 as a, 2 as a").code == 400
    cancelled = sent(call)
    cancelled.cancel()
    for kind in ("parquet", "arrow"):
        with pytest.raises(CallCancelledError):
            export(cancelled, format=kind)
    assert files(target) == []


def test_pool_without_an_absolute_directory_exports_nothing(make):
    assert refusal(make(directory=None), "not even SQL").error_code == "export_not_configured"
    for directory in ("exports", "", "../x"):
        with pytest.raises(ConfigurationError, match=r"export\.directory"):
            parse_config({"export": {"directory": directory}})


def test_key_is_no_part_of_a_path(make_call, tpch, target, tmp_path):
    key = "../../../tmp/x y"
    config = {
        **one_table("{any:.*}", view="nation", path=f"{tpch}/sf=0.001/nation.parquet"),
        "export": {"directory": target.as_uri()},
        "paging": {"directory": str(tmp_path / "pages")},
    }
    manifest = export(make_call(config, key))
    assert manifest["key"] == key
    assert [local(path) for path in manifest["paths"]] == files(target)
