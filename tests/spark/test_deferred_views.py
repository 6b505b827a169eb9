"""Views that are opened when a query first names them: the same as those that are opened at the start."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from asking import rows

from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key
from osrdyne_worker import Call, DataChangedError, RequestError
from osrdyne_worker.pipelines import sql as pipeline
from osrdyne_worker.pipelines.queries.lookup import LookupRequest
from osrdyne_worker.pipelines.sql import ExplainRequest
from osrdyne_worker.pipelines.views import loading
from osrdyne_worker.pipelines.views.data_versions import data_files
from osrdyne_worker.pipelines.views.datasets import parse_config, resolve

NAMES = ("first", "second", "third")


def open_names(call: Call) -> set[str]:
    """The views that Spark knows."""
    return {table.name for table in call.context.session.catalog.listTables() if table.isTemporary}


def write(path: Path, numbers: list[int]) -> None:
    unfinished = path.with_name(f".{path.name}")
    pq.write_table(pa.table({"number": numbers, "name": [str(number) for number in numbers]}), unfinished)
    unfinished.replace(path)


@pytest.fixture
def three(tmp_path):
    for name in NAMES:
        write(tmp_path / f"{name}.parquet", [1, 2])
    tables = [{"view": name, "path": f"{tmp_path}/{name}.parquet", "key_columns": ["number"]} for name in NAMES]
    return {"datasets": [{"key": "k", "tables": tables}]}


@pytest.mark.parametrize(
    ("query", "opened"),
    [
        ("select sum(number) from first", {"first"}),
        ("select sum(number) from FIRST where number in (select number from Second)", {"first", "second"}),
        ("with c as (select * from third) select sum(number) from c", {"third"}),
        ("with first as (select 3 as number) select number from first", {"first"}),  # not needed, but harmless
        ("select 3", set()),
    ],
)
def test_query_opens_the_views_that_it_names(make_call, three, query, opened):
    call = make_call(three, "k")
    assert [view["name"] for view in pipeline.schema(call)["views"]] == list(NAMES)
    assert open_names(call) == set()
    assert rows(call, query) == [[3]]
    assert open_names(call) == opened
    assert rows(call, query) == [[3]]


def test_refused_query_opens_nothing_and_other_paths_the_views_that_they_use(make_call, three):
    call = make_call(three, "k")
    for refused in ("select * from nowhere, first", "select rand(reflect('a', 'b')) from first"):
        with pytest.raises(RequestError):
            rows(call, refused)
    assert open_names(call) == set()
    [found] = pipeline.lookup([call], [LookupRequest(table="First", key={"number": 2})])
    assert not isinstance(found, RequestError)
    assert json.loads(found.body)["rows"] == [[2, "2"]]
    assert open_names(call) == {"first"}
    assert "Scan parquet" in pipeline.explain(call, ExplainRequest(query="select * from second"))["plan"]
    assert open_names(call) == {"first", "second"}


def test_view_is_opened_once_for_queries_at_the_same_time(make_call, three, monkeypatch):
    read, seen = loading._read, []

    def counted(session, table, **options):
        seen.append(table.spec.view)
        return read(session, table, **options)

    monkeypatch.setattr(loading, "_read", counted)
    call = make_call(three, "k")
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda limit: rows(call, f"select count(*) from first limit {limit}"), range(1, 5)))
    assert found == [[[2]]] * 4
    assert seen == ["first"]


@pytest.mark.parametrize("change", ["replaced", "removed"])
@pytest.mark.proves("files/files-change-between-start")
def test_query_never_sees_views_of_different_times(make_call, spark, three, tmp_path, change):
    call = make_call(three, "k")
    assert rows(call, "select count(*) from first") == [[2]]
    if change == "replaced":
        write(tmp_path / "second.parquet", [1, 2, 3])
    else:
        (tmp_path / "second.parquet").unlink()
    assert rows(call, "select count(*) from third") == [[2]]
    for _ in range(2):  # a query that fails leaves no view behind
        with pytest.raises(DataChangedError):
            rows(call, "select count(*) from first, second")
    # The runtime reloads the data then, and runs the query once more.
    context = replace(call.context, session=spark.newSession())
    if change == "removed":
        with pytest.raises(RequestError, match=r"no data for the view second|being written"):
            pipeline.reload_data(context)
        return
    again = Call(replace(context, state=pipeline.reload_data(context)), Request(key=Key("k"), body=b""))
    assert open_names(again) == set(NAMES), "a reload opens all views, so that it is not followed by another one"
    assert rows(again, "select count(*) from first, second") == [[6]]


def partitioned(directory: Path) -> dict[str, Any]:
    (directory / "day=1").mkdir()
    (directory / "day=1" / "t.csv").write_text("1,a\n", encoding="utf-8")
    return {"format": "csv", "columns": "number int, name string", "path": str(directory)}


def one_csv(directory: Path) -> dict[str, Any]:
    (directory / "t.csv").write_text("1,a\n2,b\n", encoding="utf-8")
    columns = "number int not null, name string, price decimal(9, 2), day date"
    return {"format": "csv", "columns": columns, "path": str(directory)}


def one_parquet(directory: Path) -> dict[str, Any]:
    table = pa.table({"number": [1, 2], "at": pa.array([1, 2], pa.timestamp("us")), "list": [[1.5], []]})
    pq.write_table(table, directory / "t.parquet")
    return {"path": str(directory), "filters": {"NUMBER": "{number}"}, "key_columns": ["number"]}


@pytest.mark.parametrize(("make", "deferred"), [(one_csv, True), (one_parquet, True), (partitioned, False)])
def test_deferred_view_is_the_one_that_spark_would_open(spark, tmp_path, make, deferred):
    (tmp_path / "data").mkdir()
    table = {"view": "t", **make(tmp_path / "data")}
    dataset = resolve(parse_config({"datasets": [{"key": "{number}", "tables": [table]}]}), "2")
    files = data_files(dataset.tables)
    session, other = spark.newSession(), spark.newSession()
    [expected] = loading.load(other, dataset)
    for _ in range(2):
        [view] = loading.load(session, dataset, files=files)
        assert (view, view.deferred is not None) == (expected, deferred)
    views = loading.DeferredViews(session, [view], files)
    views.open({"t"})
    assert views.names == frozenset()
    assert session.table("t").schema == other.table("t").schema
    assert session.table("t").collect() == other.table("t").collect()
