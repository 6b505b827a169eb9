"""Look-ups of the SQL pipeline in batches, on a real Spark."""

import itertools
import json
from typing import Any

import pyarrow as pa
import pytest
from asking import one_table
from pyspark.sql import functions as F

from osrdyne.errors import ConfigurationError
from osrdyne.protocol.messages import ARROW_TYPE, Request
from osrdyne.protocol.names import Key
from osrdyne_worker import Answer, Call, RequestError
from osrdyne_worker.pipelines import sql as pipeline
from osrdyne_worker.pipelines.queries import lookup
from osrdyne_worker.pipelines.queries.key_values import UnequalError, arrow_type, read_key_value
from osrdyne_worker.pipelines.queries.lookup import LookupRequest

KEY = "lookups"
KEYS = {
    "by_id": ["ID"],
    "by_code": ["code"],
    "by_price": ["price"],
    "by_times": ["at", "local.time"],
    "by_day_and_flag": ["day", "flag"],
    "by_raw": ["raw"],
}
VALUES: dict[str, list[Any]] = {
    "id": [1, 2, 3, 2**62, None],
    "code": ["a", "A", "a ", "", "é", "x' or true --", None],
    "price": ["1.50", "1.05", "-0.01", "9999999999.99", None],
    "at": ["2024-03-31T01:00:00Z", "2024-03-31T01:00:00.000001Z", None],
    "local.time": ["2024-03-31T02:30:00", None],
    "day": ["2024-02-29", "0001-01-01", None],
    "raw": ["", "AA==", "AP8=", None],
    "flag": [True, False, None],
}
TYPES = {
    "id": "bigint",
    "price": "decimal(12,2)",
    "at": "timestamp",
    "local.time": "timestamp_ntz",
    "day": "date",
    "raw": "binary",
    "flag": "boolean",
    "n": "bigint",
    "span": "interval year to month",
}
COUNT = 60


def rows() -> list[list[Any]]:
    """Rows of all the values, as an answer has them."""
    found: list[list[Any]] = []
    for number in range(COUNT):
        row = [values[(number * 11 + place) % len(values)] for place, values in enumerate(VALUES.values())]
        found.append([*row, number, f"INTERVAL '{number}-0' YEAR TO MONTH"])
    return found


NAMES = [*VALUES, "n", "span"]
ROWS = rows()
FOREIGN: dict[str, list[Any]] = {
    "id": [4, 2**70],
    "code": ["b", " a"],
    "price": ["1.5", "1.500", 2, "1.005", "12345678901234567890"],
    "at": ["2024-03-31T03:00:00+02:00", "1970-01-01T00:00:00Z"],
    "local.time": ["2024-03-31T02:30:00.000001"],
    "day": ["2024-02-28"],
    "raw": ["AAA="],
    "flag": [],
}
"""Values that no row has, or that are written in another way."""


@pytest.fixture(scope="module")
def path(spark, tmp_path_factory):
    columns = {}
    for place, name in enumerate(VALUES):
        kind = TYPES.get(name, "string")
        values = [row[place] for row in ROWS]
        typed = [read_key_value(name, kind, value) for value in values]
        columns[name] = pa.array(typed, arrow_type(kind))
    columns["n"] = pa.array(range(COUNT), pa.int64())
    path = str(tmp_path_factory.mktemp("lookups") / "rows")
    frame = spark.createDataFrame(pa.table(columns))
    frame = frame.withColumn("local.time", F.col("`local.time`").cast("timestamp_ntz"))
    frame.selectExpr("*", "make_ym_interval(cast(n as int), 0) as span").repartition(3).write.parquet(path)
    return path


@pytest.fixture(scope="module")
def call(make_call, path):
    tables = [{"view": view, "path": path, "key_columns": names} for view, names in KEYS.items()]
    config = {
        "datasets": [{"key": KEY, "tables": [*tables, {"view": "keyless", "path": path}]}],
        "lookup_row_limit": 40,
    }
    return make_call(config, KEY)


def ask(call: Call, *bodies: dict[str, Any]) -> list[Any]:
    """The JSON of each answer, or its error."""
    requests = [LookupRequest(**body) for body in bodies]
    answers = pipeline.lookup([call] * len(bodies), requests)
    assert len(answers) == len(bodies)
    return [answer if isinstance(answer, RequestError) else json.loads(answer.body) for answer in answers]


def expected(body: dict[str, Any]) -> list[list[Any]]:
    """The rows of a look-up, found in Python."""
    wanted = {name.lower(): value for name, value in body["key"].items()}
    found = []
    for row in ROWS:
        values = dict(zip(NAMES, row, strict=True))
        if all(_same(name, values[name], value) for name, value in wanted.items()):
            found.append([values[name] for name in body.get("columns") or NAMES])
    return sorted(found, key=repr)


def _same(name: str, value: Any, asked: Any) -> bool:
    kind = TYPES.get(name, "string")
    try:
        return bool(read_key_value(name, kind, value) == read_key_value(name, kind, asked))
    except UnequalError:
        return False


def test_all_values_are_found_in_one_batch(call):
    """In any order of keys, with all columns or some, and by any spelling of their names."""
    choices = itertools.cycle((None, ["n"], ["span", "code"], ["local.time", "raw", "price"]))
    asked = [
        {"table": view.upper(), "key": dict(zip(names, values, strict=True)), "columns": next(choices)}
        for view, names in KEYS.items()
        for values in itertools.product(*([*VALUES[name.lower()], *FOREIGN[name.lower()]] for name in names))
    ]
    for body, answer in zip(asked, ask(call, *asked), strict=True):
        assert sorted(answer["rows"], key=repr) == expected(body), body
        assert (answer["row_count"], answer["truncated"]) == (len(expected(body)), False)
        if body["columns"] is None:
            types = {column["name"]: column["type"] for column in answer["columns"]}
            assert types == {name: TYPES.get(name, "string") for name in NAMES}


def test_batch_runs_one_query_for_each_view(call, monkeypatch):
    queries: list[str] = []
    query = lookup._query

    def counted(session, lookups, **options):
        queries.append(lookups[0].view.name)
        return query(session, lookups, **options)

    monkeypatch.setattr(lookup, "_query", counted)
    asked = [{"table": view, "key": {"id" if view == "by_id" else "code": None}} for view in ["by_id", "by_code"] * 100]
    assert all(answer["row_count"] for answer in ask(call, *asked))
    assert sorted(queries) == ["by_code", "by_id"]


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"table": "orders", "key": {"id": 1}}, "unknown_table"),
    ({"table": "keyless", "key": {"id": 1}}, "no_key_columns"),
    ({"table": "by_id", "key": {}}, "invalid_key_columns"),
    ({"table": "by_id", "key": {"id": 1, "code": "a"}}, "invalid_key_columns"),
    ({"table": "by_id", "key": {"id": 1, "ID": 1}}, "invalid_key_columns"),
    ({"table": "by_id", "key": {"id": "1 or true"}}, "invalid_parameter"),
    ({"table": "by_times", "key": {"at": "2024-03-31T01:00:00", "local.time": None}}, "invalid_parameter"),
    ({"table": "by_id", "key": {"id": 1}, "columns": ["n", "nope"]}, "unknown_column"),
    ({"table": "by_id", "key": {"id": 1}, "columns": []}, "unknown_column"),
]


@pytest.mark.proves("spark/request-batch-lookup-invalid")
def test_each_faulty_request_of_a_batch_fails_alone(call):
    good = {"table": "by_id", "key": {"id": 2}, "columns": ["n"]}
    answers = ask(call, *(body for error in ERRORS for body in (error[0], good)))
    assert [answer.error_code for answer in answers[::2]] == [code for _, code in ERRORS]
    assert {answer.code for answer in answers[::2]} == {400}
    assert all(answer["row_count"] == 12 for answer in answers[1::2])


@pytest.mark.proves("spark/key-lookup-more-rows")
def test_answer_has_at_most_the_rows_of_the_limit(call, monkeypatch):
    """Also if Spark has to count the rows of each key, because all of them are too many."""
    call.context.state.config = call.context.state.config.model_copy(update={"lookup_row_limit": 11})
    try:
        for at_once in (10_000, 20):
            monkeypatch.setattr(lookup, "_ROWS_AT_ONCE", at_once)
            many, few = ask(
                call,
                {"table": "by_id", "key": {"id": 1}, "columns": ["id", "n"]},
                {"table": "by_code", "key": {"code": "A"}, "columns": ["n", "span"]},
            )
            assert (many["row_count"], many["truncated"]) == (11, True)
            assert {row[0] for row in many["rows"]} == {1}
            assert (few["row_count"], few["truncated"]) == (9, False)
            both = [{"table": "by_id", "key": {"id": value}, "columns": ["n"]} for value in (1, None, 1, 4)]
            counts = [(answer["row_count"], answer["truncated"]) for answer in ask(call, *both)]
            assert counts == [(11, True), (11, True), (11, True), (0, False)]
    finally:
        call.context.state.config = call.context.state.config.model_copy(update={"lookup_row_limit": 40})


def test_each_answer_has_the_format_that_its_caller_accepts_and_the_schema_its_key_columns(call):
    arrow = Call(call.context, Request(key=Key(KEY), body=b"", headers={"accept": ARROW_TYPE}))
    request = LookupRequest(table="by_price", key={"price": "1.05"}, columns=["price", "n"])
    as_json, as_arrow = pipeline.lookup([call, arrow], [request, request])
    assert isinstance(as_json, Answer) and isinstance(as_arrow, Answer)
    table = pa.ipc.open_stream(as_arrow.body).read_all()
    assert table.schema.names == ["price", "n"]
    assert sorted(table["n"].to_pylist()) == sorted(row[1] for row in json.loads(as_json.body)["rows"])
    views = {view["name"]: view["key_columns"] for view in pipeline.schema(call)["views"]}
    assert (views["by_times"], views["by_id"]) == (["at", "local.time"], ["id"])


def test_key_without_data_answers_each_request(make_call, tmp_path):
    call = make_call(one_table("k", path=f"{tmp_path}/none", key_columns=["id"]), "k")
    answers = ask(call, *[{"table": "t", "key": {"id": 1}}] * 3)
    assert [answer.error_code for answer in answers] == ["dataset_not_found"] * 3


def test_key_column_that_cannot_be_one_fails_the_start(make_call, path):
    for column in ("nope", "span"):
        with pytest.raises(ConfigurationError, match=column):
            make_call(one_table("k", path=path, key_columns=[column]), "k")
