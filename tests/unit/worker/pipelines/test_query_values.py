"""Values that callers give: parameters and key columns; and which requests share the run of an identical one."""

import datetime as dt
import json
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.errors import ConfigurationError
from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key
from osrdyne_worker import Call, Context, RequestError
from osrdyne_worker.pipelines.guard.refusals import QueryRefusedError
from osrdyne_worker.pipelines.guard.sql_guard import check_query
from osrdyne_worker.pipelines.queries.key_values import UnequalError, arrow_type, is_key_type, read_key_value
from osrdyne_worker.pipelines.queries.parameters import cache_key, length_of, read_parameters
from osrdyne_worker.pipelines.sql import app
from osrdyne_worker.pipelines.views.datasets import parse_config
from osrdyne_worker.spark.parameters import Parameter

VALID: list[tuple[Any, Parameter]] = [
    (None, Parameter("void", None)),
    (-(2**31), Parameter("int", -(2**31))),
    (2**31, Parameter("bigint", 2**31)),
    (2**63, Parameter("decimal", str(2**63))),
    (1.0, Parameter("double", 1.0)),
    ("it's", Parameter("string", "it's")),
    ({"type": "decimal", "value": "1.50"}, Parameter("decimal", "1.50")),
    ({"type": "decimal", "value": "1e3"}, Parameter("decimal", "1000")),
    ({"type": "date", "value": "2024-02-29"}, Parameter("date", "2024-02-29")),
    ({"type": "timestamp", "value": "2024-02-29T12:00:00+02:00"}, Parameter("timestamp", "2024-02-29T10:00:00Z")),
    ({"type": "timestamp_ntz", "value": "2024-02-29T12:00"}, Parameter("timestamp_ntz", "2024-02-29T12:00:00")),
    ({"type": "binary", "value": "AP8="}, Parameter("binary", b"\x00\xff")),
]


@pytest.mark.parametrize(("given", "parameter"), VALID, ids=str)
def test_value_has_its_type_in_spark(given, parameter):
    assert read_parameters({"k": given}) == {"k": parameter}
    assert read_parameters([given]) == (parameter,)


INVALID = {
    "array<int>": ["1"],
    "date": ["2024-02-30", None],
    "timestamp": ["2024-02-29T12:00:00", "0001-01-01T00:00:00+02:00"],
    "timestamp_ntz": ["2024-02-29T12:00:00Z"],
    "decimal": ["1e40", "NaN", "one"],
    "binary": ["*"],
    "double": ["one"],
}
TYPED = [{"type": kind, "value": value} for kind, values in INVALID.items() for value in values]


@pytest.mark.parametrize(
    "given", [*TYPED, [1, 2], {"value": 1}, {"type": "int", "value": 1, "more": 1}, 10**40, "\ud800"], ids=ascii
)
def test_invalid_value_is_refused_by_its_name(given):
    with pytest.raises(RequestError, match=r"parameters\.k") as by_name:
        read_parameters({"k": given})
    with pytest.raises(RequestError, match=r"parameters\[1\]"):
        read_parameters([0, given])
    assert (by_name.value.code, by_name.value.error_code) == (400, "invalid_parameter")


def test_parameters_are_limited_counted_in_each_place_and_cached_apart():
    with pytest.raises(RequestError, match="1001"):
        read_parameters([0] * 1001)
    assert [read_parameters(given) for given in (None, {}, [])] == [None, None, None]
    value = "'" * 1000
    query = "select " + ", ".join([":text"] * 50)
    assert length_of(query, read_parameters({"text": value})) >= len(query) + 50 * 2000
    assert length_of("select :text", read_parameters({"text": value})) < 2100
    assert length_of("select ?", read_parameters([value])) >= 2000
    values = [True, 1, 1.0, 0.0, -0.0, "1", None]  # some are equal in Python
    assert len({cache_key(read_parameters([value])) for value in values}) == len(values)
    assert cache_key(read_parameters({"a": 1, "b": 2})) == cache_key(read_parameters({"b": 2, "a": 1}))


@pytest.mark.parametrize(
    ("query", "parameters", "named"),
    [
        ("select :k, :n from t", {"k": 1}, ":n"),
        ("select :k from t", [1], ":k"),
        ("select :k from t", None, ":k"),
        ("select ?, ? from t", [1], "2 parameters"),
        ("select ? from t", {"k": 1}, "a list"),
    ],
)
def test_parameter_without_a_value_is_named(query, parameters, named):
    all_given = read_parameters({"k": 1, "n": 2, "unused": 3})
    check_query("select * from t where a = :k limit :n", views={"t"}, parameters=all_given or ())
    with pytest.raises(QueryRefusedError, match=named) as caught:
        check_query(query, views={"t"}, parameters=read_parameters(parameters) or ())
    assert (caught.value.code, caught.value.error_code) == (400, "missing_parameter")


@pytest.mark.parametrize(
    ("kind", "given", "value"),
    [
        ("boolean", True, True),
        ("bigint", 2**63 - 1, 2**63 - 1),
        ("decimal(12,2)", "1.500", Decimal("1.50")),
        ("decimal(12,2)", 7, Decimal("7.00")),
        ("string", "x' or '1'='1", "x' or '1'='1"),
        ("date", "2024-02-29", dt.date(2024, 2, 29)),
        ("timestamp", "2024-02-29T12:00:00+02:00", dt.datetime(2024, 2, 29, 10, tzinfo=dt.UTC)),
        ("timestamp_ntz", "2024-02-29T12:00:00.000001", dt.datetime(2024, 2, 29, 12, 0, 0, 1)),
        ("binary", "AP8=", b"\x00\xff"),
        ("string", None, None),
    ],
)
def test_value_has_the_type_of_its_column(kind, given, value):
    found = read_key_value("key.c", kind, given)
    assert (found, type(found)) == (value, type(value))
    assert is_key_type(kind)
    assert pa.array([found, None], arrow_type(kind)).to_pylist() == [value, None]


def test_number_that_the_column_cannot_hold_equals_no_row():
    numbers = {"tinyint": 128, "int": 2**31, "bigint": -(2**63) - 1, "decimal(12,2)": "1.005", "decimal(3,2)": "10"}
    for kind, number in numbers.items():
        with pytest.raises(UnequalError):
            read_key_value("key.c", kind, number)


def test_key_column_has_exact_equality_and_is_named_once():
    for inexact in ("double", "array<int>", "string collate UTF8_LCASE", "variant", "void"):
        assert not is_key_type(inexact), inexact
    table = {"view": "t", "path": "/data/t", "key_columns": ["id", "ID"]}
    with pytest.raises(ConfigurationError, match="key_columns"):
        parse_config({"datasets": [{"key": "k", "tables": [table]}]})


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("boolean", 1),
        *(("int", value) for value in (True, 1.0, "1")),
        *(("decimal(12,2)", value) for value in (1.5, "NaN", "1,5")),
        *(("string", value) for value in (1, "\ud800", {"type": "string", "value": "x"})),
        *(("date", value) for value in (20240229, "2024-02-30")),
        ("timestamp", "2024-02-29T12:00:00"),
        ("timestamp_ntz", "2024-02-29T12:00:00Z"),
        ("binary", "AP8"),
        ("bigint", [1]),
    ],
    ids=ascii,
)
def test_value_of_another_type_is_refused_by_its_place(kind, value):
    with pytest.raises(RequestError, match=r"^key\.c ") as caught:
        read_key_value("key.c", kind, value)
    assert (caught.value.code, caught.value.error_code) == (400, "invalid_parameter")


@given(st.integers() | st.text() | st.floats() | st.booleans() | st.none() | st.lists(st.integers()))
def test_any_value_is_read_refused_or_unequal(value):
    for kind in ("boolean", "smallint", "decimal(10,3)", "string", "date", "timestamp", "timestamp_ntz", "binary"):
        try:
            found = read_key_value("key.c", kind, value)
        except (RequestError, UnequalError):
            continue
        pa.array([found], arrow_type(kind))


coalesces = app.registered_handlers()["/sql"].coalesce
PLAIN = {"query": "select brand, sum(current) as n from t group by brand", "limit": 10}


@dataclass(frozen=True)
class Data:
    config: Any
    is_fixed: bool = True


FIXED = Data(parse_config({"coalesce": True}))


def said(body: object, data: Data = FIXED) -> bool | None:
    assert callable(coalesces)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return coalesces(Call(Context(Key("k"), state=data), Request(key="k", path="/sql", body=content)))


@pytest.mark.parametrize(
    "body",
    [
        *({"query": f"select {text}"} for text in ("RAND() as x", "randn(), 1", "uuid()", "now()", "localtimestamp()")),
        {"query": "select date 'TODAY'"},
        {"query": "select * from t tablesample (10 rows)"},
        {"query": "select 1", "page_size": 5},
        {"cursor": "x.5"},
        b'{"query": "select \\u0072and()"}',
        {"query": "select 1 -- " + 70_000 * "x"},
    ],
    ids=range(11),
)
def test_identical_queries_share_a_run_unless_each_has_an_answer_of_its_own(body):
    assert said(PLAIN) is True
    assert said(PLAIN, replace(FIXED, config=parse_config({}))) is None, "as the route says"
    assert said(PLAIN, replace(FIXED, is_fixed=False)) is False, "the data is read when the query runs"
    assert said(body) is False
