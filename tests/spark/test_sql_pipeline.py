"""The handlers of the SQL pipeline on a real Spark."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from asking import ask, one_table, refusal, rows

from osrdyne.protocol.messages import ARROW_TYPE
from osrdyne_worker import Call, RequestError
from osrdyne_worker.pipelines import sql as pipeline
from osrdyne_worker.pipelines.sql import ExplainRequest, SqlRequest
from osrdyne_worker.pipelines.views import caching
from osrdyne_worker.pipelines.views.caching import drop_cached
from osrdyne_worker.spark.answers.results import prepare

QUERIES = Path(__file__).parents[1] / "queries"


def accepted(*files: str) -> list[Any]:
    return [
        pytest.param(query, id=name)
        for file in files
        for name, query in yaml.safe_load((QUERIES / file).read_text(encoding="utf-8")).items()
    ]


@pytest.fixture
def call(tpch_call):
    return tpch_call


@pytest.mark.parametrize("query", accepted("tpch.yaml"))
def test_query_of_tpch_passes_both_checks(call, query):
    """To run them, with their joins, would only test Spark."""
    assert call.context.state.prepared(query).types


@pytest.mark.parametrize("query", accepted("accepted.yaml", "spark_only.yaml"))
def test_accepted_query_passes_both_checks_and_runs(call, query):
    assert ask(call, query, limit=3)["columns"]


def test_text_that_neither_parser_reads_or_that_is_refused_is_one_line(call):
    for query in ("select 'abc", "select 1 +", "from nation select (", "select 1 >>> "):
        error = refusal(call, query)
        assert (error.code, "\n" in error.message) == (400, False), query
    error = refusal(call, "select * from csv.`/etc/passwd`")
    assert (error.code, error.error_code, error.details) == (403, "table_not_allowed", {"line": 1, "column": 19})


TYPES: list[tuple[str, str, Any]] = [
    ("cast('12345678901234567890.123456789' as decimal(38, 9))", "decimal(38,9)", "12345678901234567890.123456789"),
    ("cast(0 as decimal(38, 18))", "decimal(38,18)", "0.000000000000000000"),
    ("9223372036854775807", "bigint", 9223372036854775807),
    ("cast(-128 as tinyint)", "tinyint", -128),
    ("double('NaN')", "double", "NaN"),
    ("double('-Infinity')", "double", "-Infinity"),
    ("cast('Infinity' as float)", "float", "Infinity"),
    ("0.1D", "double", 0.1),
    ("true", "boolean", True),
    ("null", "void", None),
    ("'é漢🚄\"\\n'", "string", 'é漢🚄"\n'),
    ("date '2024-02-29'", "date", "2024-02-29"),
    ("date '12024-02-29'", "date", "+12024-02-29"),
    ("timestamp '2024-02-29 12:00:00+02:00'", "timestamp", "2024-02-29T10:00:00Z"),
    ("timestamp '2024-02-29 12:00:00.000001Z'", "timestamp", "2024-02-29T12:00:00.000001Z"),
    ("timestamp_ntz '2024-02-29 12:00:00'", "timestamp_ntz", "2024-02-29T12:00:00"),
    ("x'00ff'", "binary", "AP8="),
    ("interval '1 02:00:00.5' day to second", "interval day to second", "PT93600.5S"),
    ("interval '-1' day", "interval day", "-PT86400S"),
    ("interval '1-2' year to month", "interval year to month", "INTERVAL '1-2' YEAR TO MONTH"),
    ("parse_json('{\"a\": [1, null]}')", "variant", '{"a":[1,null]}'),
    ("array(1, null, 3)", "array<int>", [1, None, 3]),
    ("array(array(1), array())", "array<array<int>>", [[1], []]),
    ("named_struct('a', 1, 'b', date '2024-01-01')", "struct<a:int,b:date>", {"a": 1, "b": "2024-01-01"}),
    ("map('k', 1.50BD)", "map<string,decimal(3,2)>", {"k": "1.50"}),
    ("map(1, 'x', 2, null)", "map<int,string>", [[1, "x"], [2, None]]),
    ("array(named_struct('m', map('k', x'01')))", "array<struct<m:map<string,binary>>>", [{"m": {"k": "AQ=="}}]),
    ("cast(null as struct<a:int>)", "struct<a:int>", None),
    ("array(double('NaN'))", "array<double>", ["NaN"]),
]


def test_value_of_each_type_is_exact_in_json(call):
    query = "select " + ", ".join(expression for expression, _, _ in TYPES)
    document = ask(call, query)
    assert [column["type"] for column in document["columns"]] == [kind for _, kind, _ in TYPES]
    assert document["rows"] == [[value for _, _, value in TYPES]]
    assert ask(call, query) == document, "asked again"


def test_columns_of_one_name_are_all_answered_also_without_rows(call):
    rows = ask(call, "select 1 as a, 2 as a, interval '1-2' year to month as a")["rows"]
    assert rows == [[1, 2, "INTERVAL '1-2' YEAR TO MONTH"]]
    document = ask(call, "select n_name from nation where false")
    assert ask(call, "select n_name from nation where false") == document, "asked again"
    assert (document["rows"], document["row_count"], document["truncated"]) == ([], 0, False)
    assert document["columns"] == [{"name": "n_name", "type": "string"}]


def test_limit_cuts_and_reports_it(call):
    for limit, truncated in ((24, True), (25, False), (26, False), (0, True)):
        document = ask(call, "select n_name from nation order by 1", limit=limit)
        assert (document["row_count"], document["truncated"]) == (min(limit, 25), truncated)
        assert len(document["rows"]) == document["row_count"]


def test_query_asked_again_is_not_analysed_again_and_is_right_each_time(call):
    query = "select r_name from region"
    assert call.context.state.prepared(query) is call.context.state.prepared(query)
    with ThreadPoolExecutor(4) as threads:
        answers = threads.map(lambda limit: ask(call, query, limit=limit), [0, 1, 2, 5] * 3)
        assert [found["row_count"] for found in answers] == [0, 1, 2, 5] * 3
    clock = "select current_timestamp() as t"
    assert ask(call, clock)["rows"] != ask(call, clock)["rows"]


@pytest.mark.parametrize(
    "query",
    [
        "select rand() as x",
        "select uuid() as x",
        "select (select max(x) from (select randn() as x from region)) as x",
        "select count(*) as x from lineitem tablesample (5 percent)",
        "select count(*) as n from values (repeat('x', 1000000)), (repeat('y', 1000000)) as t(v)",
    ],
)
def test_query_that_draws_random_numbers_or_has_rows_of_its_own_is_analysed_each_time(call, query):
    """The plan of the last one holds the evaluated rows: a short text may make many megabytes of them."""
    assert ask(call, query)["row_count"] == 1
    assert call.context.state.prepared(query) is not call.context.state.prepared(query)


def test_pyspark_without_the_method_below_to_arrow_answers_too(call):
    class Frame:
        def __init__(self, frame: Any) -> None:
            self.limit = lambda count: Frame(frame.limit(count))
            self.toArrow = frame.toArrow
            self.schema = frame.schema

    query = prepare(Frame(call.context.session.sql("select 1 as a union all select 2")))
    assert [query.run(limit=1).to_json(), query.run(limit=2).table.num_rows] == [
        b'{"columns":[{"name":"a","type":"int"}],"rows":[[1]],"row_count":1,"truncated":true}',
        2,
    ]


def test_limit_of_the_configuration_holds_by_default(make_call, tpch_config):
    call = make_call({**tpch_config, "row_limit": 7, "max_row_limit": 9}, "tpch/sf=0.001")
    assert ask(call, "select * from nation")["row_count"] == 7
    assert refusal(call, "select * from nation", limit=10).error_code == "limit_too_large"


def test_arrow_stream_carries_rows_types_and_the_flag(make_call, tpch_config):
    call = make_call(tpch_config, "tpch/sf=0.001", accept=f"application/json;q=0.5, {ARROW_TYPE}")
    reply = pipeline.sql(call, SqlRequest(query="select l_orderkey, l_tax, l_shipdate from lineitem", limit=100))
    table = pa.ipc.open_stream(reply.body).read_all()
    assert table.num_rows == 100
    assert table.schema.types == [pa.int64(), pa.decimal128(15, 2), pa.date32()]
    assert table.schema.metadata == {b"truncated": b"true", b"row_count": b"100"}
    assert (reply.content_type, reply.headers["x-truncated"]) == (ARROW_TYPE, "true")
    empty = pipeline.sql(call, SqlRequest(query="select 1 as a where false"))
    assert pa.ipc.open_stream(empty.body).read_all().num_rows == 0


ERRORS = [
    ("select nope from nation", 400, "UNRESOLVED_COLUMN.WITH_SUGGESTION"),
    ("select 1 / (n_nationkey - n_nationkey) from nation", 400, "DIVIDE_BY_ZERO"),
    ("select cast(n_name as int) from nation", 400, "CAST_INVALID_INPUT"),
    ("select sum(n_name) + array(1) from nation", 400, "DATATYPE_MISMATCH"),
    ("select element_at(array(1), 5)", 400, "INVALID_ARRAY_INDEX_IN_ELEMENT_AT"),
    ("select raise_error('on purpose') from nation", 500, "USER_RAISED_EXCEPTION"),
    ("select n_name, count(*) from nation", 400, "MISSING_GROUP_BY"),
    ("select (select n_name from nation)", 400, "SCALAR_SUBQUERY_TOO_MANY_ROWS"),
]


@pytest.mark.parametrize(("query", "code", "condition"), ERRORS, ids=[case[2] for case in ERRORS])
def test_error_of_spark_is_its_class_and_one_line(call, query, code, condition):
    error = refusal(call, query)
    assert error.error_code.startswith(condition)
    assert error.code == code
    assert "\n" not in error.message
    assert not any(word in error.message for word in ("Traceback", "org.apache", "\tat ", "Py4J"))


def plan_of(call: Call, query: str, **fields: Any) -> str:
    return pipeline.explain(call, ExplainRequest(query=query, **fields))["plan"]


def test_explain_shows_the_plan_and_runs_nothing(call):
    assert "HashAggregate" in plan_of(call, "select count(*) from nation")
    assert "== Analyzed Logical Plan ==" in plan_of(call, "select 1", mode="extended")
    with pytest.raises(RequestError):
        plan_of(call, "drop view nation")


def test_schema_names_views_and_columns(call):
    views = {view["name"]: view for view in pipeline.schema(call)["views"]}
    assert len(views) == 8
    assert views["region"]["columns"][0] == {"name": "r_regionkey", "type": "bigint", "nullable": True}


def test_cache_status_shows_what_is_in_memory(make_call, tpch):
    tables = [{"view": name, "path": f"{tpch}/sf=0.001/{name}.parquet", "cache": name == "orders"} for name in
              ("orders", "region")]  # fmt: skip
    call = make_call({"datasets": [{"key": "x", "tables": tables}]}, "x")
    assert call.context.state.caching.wait(300)
    orders, region = pipeline.cache_status(call)["views"]
    assert orders["cached"]
    assert orders["memory_bytes"] > 1000
    assert orders["cached_partitions"] == orders["partitions"] > 0
    assert (region["cached"], region["memory_bytes"]) == (False, 0)


def test_qualified_names_and_the_information_schema_are_those_of_the_key(make_call, tmp_path):
    table = pa.table({"id": pa.array([1, 2], pa.int32()), "default": [{"orders": {"id": 7}}] * 2})
    pq.write_table(table, tmp_path / "t.parquet")
    call = make_call(one_table("q", view="orders", path=str(tmp_path / "t.parquet")), "q")
    call.context.session.range(3).createOrReplaceTempView("hidden")
    names = "`Default`.orders", "spark_catalog.default.ORDERS"
    assert [rows(call, f"select max(default.orders.id) from {name}") for name in names] == [[[2]]] * 2
    assert rows(call, "select max(default.orders.id) from orders") == [[7]], "a field of a column"
    assert rows(call, "from default.orders |> aggregate max(orders.id)") == [[2]]
    assert rows(call, "select * from INFORMATION_SCHEMA.tables") == [["spark_catalog", "default", "orders", "VIEW"]]
    assert rows(call, "select column_name, data_type, is_nullable from information_schema.columns order by"
                      " information_schema.columns.ordinal_position limit 1") == [["id", "int", "YES"]]  # fmt: skip
    assert rows(call, "select schema_name from information_schema.schemata, information_schema.tables t where"
                      " schemata.schema_name = t.table_schema and table_name = 'orders'") == [["default"]]  # fmt: skip
    remembered = call.context.state._remembered._values.items()
    kept = "".join(query for (query, *_), (prepared, _) in remembered if prepared is not None)
    assert "spark_catalog.default.ORDERS" in kept
    assert "information_schema" not in kept.lower(), "its rows would be in the plans"
    join = (
        "select /*+ shuffle_replicate_nl(default.orders) */ 1 from default.orders join range(3) r on orders.id = r.id"
    )
    assert "CartesianProduct" in plan_of(call, join)
    for query in ("select * from default.hidden", "select * from tables", "select * from information_schema.views",
                  "with orders as (select 1) select * from default.orders"):  # fmt: skip
        assert refusal(call, query).error_code in {"table_not_allowed", "unknown_table"}
    wrong = refusal(call, "select default.orders.id\nfrom default.orders, default.hidden")
    assert (wrong.details or {})["line"] == 2


def test_cache_status_shows_nothing_of_another_key(make_call, tmp_path):
    """In a pooled process they share one Spark, and their views may have the same names."""
    calls: dict[str, Call] = {}
    for key, size in (("a", 10), ("b", 20_000)):
        pq.write_table(pa.table({"id": list(range(size))}), tmp_path / f"{key}.parquet")
        calls[key] = make_call(one_table(key, view="t", path=str(tmp_path / f"{key}.parquet"), cache=True), key)
        assert calls[key].context.state.caching.wait(300)
    small, large = (pipeline.cache_status(calls[key])["views"][0]["memory_bytes"] for key in "ab")
    assert 0 < small < 1_000 < large
    drop_cached(calls["a"].context.session, ["t"])
    assert pipeline.cache_status(calls["a"])["views"][0]["memory_bytes"] == 0


def test_first_request_is_served_from_the_files_and_later_ones_from_memory(make_call, tpch, monkeypatch):
    monkeypatch.setattr(caching, "START_DELAY", 600.0)
    path = f"{tpch}/sf=0.001/supplier.parquet"
    call = make_call(one_table("y", view="supplier", path=path, cache=True), "y")
    query = "select count(*), sum(s_acctbal) from supplier"
    assert not pipeline.cache_status(call)["views"][0]["cached"]
    assert "Scan parquet" in plan_of(call, query)
    first = rows(call, query)
    assert call.context.state.caching.wait(300), "the end of the first request starts it"
    assert "In-memory table" in plan_of(call, query)
    prepared = call.context.state.prepared(query)
    assert "In-memory table" in prepared.frame._jdf.queryExecution().executedPlan().toString()
    assert rows(call, query) == first


def test_filtered_view_is_in_memory_before_the_first_request(make_call, tpch, monkeypatch):
    monkeypatch.setattr(caching, "START_DELAY", 600.0)
    path = f"{tpch}/sf=0.001/nation.parquet"
    config = one_table("{region}", view="nation", path=path, cache=True, filters={"n_regionkey": "{region}"})
    call = make_call(config, "1")
    assert pipeline.cache_status(call)["views"][0]["cached"]
    assert "In-memory table" in plan_of(call, "select * from nation")


def test_view_that_cannot_be_cached_stays_on_its_files(make_call, tpch, monkeypatch):
    def fail(*_):
        raise RuntimeError("no room")

    monkeypatch.setattr(caching, "cache_now", fail)
    call = make_call(one_table("z", view="region", path=f"{tpch}/sf=0.001/region.parquet", cache=True), "z")
    assert call.context.state.caching.wait(300)
    assert rows(call, "select count(*) from region") == [[5]]
    assert not pipeline.cache_status(call)["views"][0]["cached"]
