"""Data that Spark cannot read: it costs its view, and neither the other views of the key nor the worker."""

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from asking import one_table, refusal, rows

from osrdyne_worker import Call
from osrdyne_worker.app.errors import DataChangedError
from osrdyne_worker.pipelines import sql as pipeline
from osrdyne_worker.pipelines.sql import SqlRequest

NANOSECONDS = pa.table({"t": pa.array([1_711_848_600_000_000_001], pa.timestamp("ns"))})
UUIDS = pa.table({"u": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16)], pa.binary(16)))})
TABLES = {
    "binary": UUIDS,
    "spark.sql.legacy.parquet.nanosAsLong": NANOSECONDS,
    "spark.sql.timeType.enabled": pa.table({"t": pa.array([dt.time(1, 2, 3)], pa.time64("us"))}),
    "spark.sql.caseSensitive": pa.table({"Id": [1], "id": [2]}),
    "as float": pa.table({"v": pa.array([1.5], pa.float32()).cast(pa.float16())}),
    "38 digits": pa.table({"v": pa.array([Decimal("1.5")], pa.decimal256(60, 2))}),
}


@pytest.fixture
def dataset(tmp_path, make_call):
    """Makes a key with the view `good`, and the view `bad` of the given table."""
    pq.write_table(pa.table({"id": [7]}), tmp_path / "good.parquet")

    def make(**bad):
        good = {"view": "good", "path": str(tmp_path / "good.parquet")}
        call: Call = make_call({"datasets": [{"key": "k", "tables": [good, {"view": "bad", **bad}]}]}, "k")
        return call

    return make


@pytest.mark.parametrize("remedy", TABLES)
@pytest.mark.proves("spark/view-cannot-be-read")
def test_view_that_spark_cannot_read_costs_no_other_view(dataset, tmp_path, remedy):
    path = tmp_path / "bad.parquet"
    pq.write_table(TABLES[remedy], path)
    call = dataset(path=str(path))
    error = refusal(call, "select * from bad")
    assert (error.code, error.error_code) == (500, "dataset_unreadable")
    assert (str(path) in error.message, " bad " in error.message, remedy in error.message) == (True, True, True)
    assert rows(call, "select id from good") == [[7]]
    assert refusal(call, "select 1 from good join bad on true").error_code == "dataset_unreadable"


def test_unreadable_columns_are_named_with_the_option_that_drops_them(dataset, tmp_path):
    path = tmp_path / "bad.parquet"
    pq.write_table(UUIDS.append_column("id", [[5]]), path)
    message = refusal(dataset(path=str(path)), "select * from bad").message
    assert ("columns: u;" in message, "unreadable_columns" in message) == (True, True)
    declared = dataset(path=str(path), columns="u binary, id bigint")
    assert rows(declared, "select id, length(u) from bad") == [[5, 16]]


@pytest.mark.parametrize("directory", ["", "day=1"], ids=["flat", "partitioned"])
def test_columns_that_spark_cannot_read_are_dropped_and_listed(dataset, tmp_path, directory):
    (tmp_path / "bad" / directory).mkdir(parents=True)
    columns = {"n": NANOSECONDS, "u": UUIDS, "t": TABLES["spark.sql.timeType.enabled"], "d": TABLES["38 digits"]}
    unreadable = {name: table.column(0) for name, table in columns.items()}
    kept = pa.table({"id": [5], "tenant": ["a"], **unreadable, "Twice": [1], "twice": [2]})
    pq.write_table(kept, tmp_path / "bad" / directory / "a.parquet")
    call = dataset(path=str(tmp_path / "bad"), unreadable_columns="drop", filters={"tenant": "a"})
    [bad] = [view for view in pipeline.schema(call)["views"] if view["name"] == "bad"]
    assert {column["name"] for column in bad["columns"]} - {"day"} == {"id", "tenant"}
    assert bad["dropped_columns"].keys() == {*columns, "Twice", "twice"}
    assert rows(call, "select id from bad") == [[5]]


def test_file_of_another_kind_is_named_with_the_option_that_leaves_it_out(dataset, tmp_path):
    (tmp_path / "bad").mkdir()
    pq.write_table(pa.table({"id": [1]}), tmp_path / "bad" / "m.parquet")
    for name in ("a.txt", "z.txt"):  # the schema is read from the first file
        (tmp_path / "bad" / name).write_text("hello", encoding="utf-8")
        error = refusal(dataset(path=str(tmp_path / "bad")), "select * from bad")
        assert (error.error_code, name in error.message) == ("dataset_unreadable", True)
        assert "pathGlobFilter" in error.message
        (tmp_path / "bad" / name).unlink()
    (tmp_path / "bad" / "z.txt").write_text("hello", encoding="utf-8")
    call = dataset(path=str(tmp_path / "bad"), options={"pathGlobFilter": "*.parquet"})
    assert rows(call, "select * from bad") == [[1]]


def test_files_that_cannot_be_merged_are_named_with_their_types(dataset, tmp_path):
    (tmp_path / "merge").mkdir()
    pq.write_table(pa.table({"v": [1.5]}), tmp_path / "merge" / "a.parquet")
    pq.write_table(pa.table({"v": ["n/a"]}), tmp_path / "merge" / "b.parquet")
    error = refusal(dataset(path=str(tmp_path / "merge"), options={"mergeSchema": True}), "select * from bad")
    assert error.error_code == "dataset_unreadable"
    assert ("DOUBLE" in error.message, "STRING" in error.message) == (True, True)


def test_wrong_option_of_a_reader_is_named(dataset, tmp_path):
    path = tmp_path / "pretty.json"
    path.write_text('{\n "id": 1\n}\n', encoding="utf-8")
    for options, named in (({"basePath": "merge"}, "basePath"), ({"mode": "FAILFAST"}, "multiLine"), ({}, "multiLine")):
        error = refusal(dataset(path=str(path), format="json", options=options), "select * from bad")
        assert (error.error_code, named in error.message) == ("dataset_unreadable", True)


def test_view_is_opened_with_its_filter_once_its_data_can_be_read(dataset, tmp_path):
    path = tmp_path / "bad.parquet"
    pq.write_table(NANOSECONDS, path)
    call = dataset(path=str(path), filters={"tenant": "a"})
    schema = {view["name"]: view for view in pipeline.schema(call)["views"]}
    assert ("problem" in schema["bad"], "problem" in schema["good"]) == (True, False)
    pq.write_table(pa.table({"tenant": ["a", "b"], "v": [1, 2]}), path)
    # The worker loads the data again; until then no row of another tenant can be seen.
    with pytest.raises(DataChangedError):
        pipeline.sql(call, SqlRequest(query="select v from bad"))
    assert not call.context.session.catalog.tableExists("bad")
    call.context.state.load()
    assert rows(call, "select v from bad") == [[1]]


def test_key_whose_only_view_cannot_be_read_is_answered_so(make_call, tmp_path):
    pq.write_table(NANOSECONDS, tmp_path / "t.parquet")
    call = make_call(one_table("k", path=str(tmp_path / "t.parquet")), "k")
    assert refusal(call, "select 1").error_code == "dataset_unreadable"
