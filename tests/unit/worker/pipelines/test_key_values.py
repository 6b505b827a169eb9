"""The values of key columns in look-ups, by the type of the column."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.errors import ConfigurationError
from osrdyne_worker import RequestError
from osrdyne_worker.pipelines.queries.key_values import UnequalError, arrow_type, is_key_type, read_key_value
from osrdyne_worker.pipelines.views.datasets import parse_config


@pytest.mark.parametrize(
    ("kind", "given", "value"),
    [
        ("boolean", True, True),
        ("tinyint", -128, -128),
        ("bigint", 2**63 - 1, 2**63 - 1),
        ("decimal(12,2)", "1.5", Decimal("1.50")),
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
def test_value_has_the_type_of_its_column(kind: str, given: Any, value: Any) -> None:
    found = read_key_value("key.c", kind, given)
    assert (found, type(found)) == (value, type(value))
    assert is_key_type(kind)
    assert pa.array([found, None], arrow_type(kind)).to_pylist() == [value, None]


@pytest.mark.parametrize(
    ("kind", "given"),
    [("tinyint", 128), ("bigint", -(2**63) - 1), ("decimal(12,2)", "1.005"), ("decimal(3,2)", "10"), ("int", 2**31)],
)
def test_number_that_the_column_cannot_hold_equals_no_row(kind: str, given: Any) -> None:
    with pytest.raises(UnequalError):
        read_key_value("key.c", kind, given)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("boolean", [1]),
        ("int", [True, 1.0, "1"]),
        ("decimal(12,2)", [1.5, "NaN", "1,5"]),
        ("string", [1, "\ud800", {"type": "string", "value": "x"}]),
        ("date", [20240229, "2024-02-30"]),
        ("timestamp", ["2024-02-29T12:00:00"]),
        ("timestamp_ntz", ["2024-02-29T12:00:00Z"]),
        ("binary", ["AP8"]),
        ("bigint", [[1]]),
    ],
)
def test_value_of_another_type_is_refused_by_its_place(kind: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=r"^key\.c ") as caught:
            read_key_value("key.c", kind, value)
        assert (caught.value.code, caught.value.error_code) == (400, "invalid_parameter"), value


@given(st.integers() | st.text() | st.floats() | st.booleans() | st.none() | st.lists(st.integers()))
def test_any_value_is_read_refused_or_unequal(value: Any) -> None:
    for kind in ("boolean", "smallint", "decimal(10,3)", "string", "date", "timestamp", "timestamp_ntz", "binary"):
        try:
            found = read_key_value("key.c", kind, value)
        except (RequestError, UnequalError):
            continue
        pa.array([found], arrow_type(kind))


@pytest.mark.parametrize("kind", ["float", "double", "array<int>", "string collate UTF8_LCASE", "variant", "void"])
def test_type_without_exact_equality_is_no_key(kind: str) -> None:
    assert not is_key_type(kind)


def test_key_column_that_is_named_twice_is_an_error_of_the_configuration() -> None:
    table = {"view": "t", "path": "/data/t", "key_columns": ["id", "ID"]}
    with pytest.raises(ConfigurationError, match="key_columns"):
        parse_config({"datasets": [{"key": "k", "tables": [table]}]})
