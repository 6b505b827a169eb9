"""The parameters of a query: their JSON forms, their size, and the first check of a query that has some."""

from __future__ import annotations

from typing import Any

import pytest

from osrdyne_worker import RequestError
from osrdyne_worker.pipelines.guard.refusals import QueryRefusedError
from osrdyne_worker.pipelines.guard.sql_guard import check_query
from osrdyne_worker.pipelines.queries.parameters import cache_key, length_of, read_parameters
from osrdyne_worker.spark.parameters import Parameter

VALID: list[tuple[Any, Parameter]] = [
    (None, Parameter("void", None)),
    (True, Parameter("boolean", True)),
    (-(2**31), Parameter("int", -(2**31))),
    (2**31, Parameter("bigint", 2**31)),
    (2**63, Parameter("decimal", str(2**63))),
    (1.0, Parameter("double", 1.0)),
    ("it's", Parameter("string", "it's")),
    ({"type": "decimal", "value": "1.50"}, Parameter("decimal", "1.50")),
    ({"type": "decimal", "value": "1e3"}, Parameter("decimal", "1000")),
    ({"type": "double", "value": 1}, Parameter("double", 1.0)),
    ({"type": "date", "value": "2024-02-29"}, Parameter("date", "2024-02-29")),
    ({"type": "timestamp", "value": "2024-02-29T12:00:00+02:00"}, Parameter("timestamp", "2024-02-29T10:00:00Z")),
    ({"type": "timestamp_ntz", "value": "2024-02-29T12:00"}, Parameter("timestamp_ntz", "2024-02-29T12:00:00")),
    ({"type": "binary", "value": "AP8="}, Parameter("binary", b"\x00\xff")),
]


@pytest.mark.parametrize(("given", "parameter"), VALID, ids=str)
def test_value_has_its_type_in_spark(given: Any, parameter: Parameter) -> None:
    assert read_parameters({"k": given}) == {"k": parameter}
    assert read_parameters([given]) == (parameter,)


@pytest.mark.parametrize(
    "given",
    [
        [1, 2],
        {"value": 1},
        {"type": "int", "value": 1, "more": 1},
        *(
            {"type": kind, "value": value}
            for kind, values in {
                "array<int>": ["1"],
                "date": ["2024-02-30", None],
                "timestamp": ["2024-02-29T12:00:00", "0001-01-01T00:00:00+02:00"],
                "timestamp_ntz": ["2024-02-29T12:00:00Z"],
                "decimal": ["1e40", "NaN", "one"],
                "binary": ["*"],
                "double": ["one"],
            }.items()
            for value in values
        ),
        10**40,
        "\ud800",
    ],
    ids=ascii,
)
def test_invalid_value_is_refused_by_its_name(given: Any) -> None:
    with pytest.raises(RequestError, match=r"parameters\.k") as by_name:
        read_parameters({"k": given})
    with pytest.raises(RequestError, match=r"parameters\[1\]"):
        read_parameters([0, given])
    assert (by_name.value.code, by_name.value.error_code) == (400, "invalid_parameter")


def test_number_of_parameters_is_limited_and_none_are_none() -> None:
    with pytest.raises(RequestError, match="1001"):
        read_parameters([0] * 1001)
    assert [read_parameters(given) for given in (None, {}, [])] == [None, None, None]


def test_length_counts_a_value_in_each_of_its_places() -> None:
    value = "'" * 1000
    query = "select " + ", ".join([":text"] * 50)
    assert length_of(query, read_parameters({"text": value})) >= len(query) + 50 * 2000
    assert length_of("select :text", read_parameters({"text": value})) < 2100
    assert length_of("select ?", read_parameters([value])) >= 2000


def test_values_that_are_equal_in_python_are_cached_apart() -> None:
    values = [True, 1, 1.0, 0.0, -0.0, "1", None]
    assert len({cache_key(read_parameters([value])) for value in values}) == len(values)
    assert cache_key(read_parameters({"a": 1, "b": 2})) == cache_key(read_parameters({"b": 2, "a": 1}))


@pytest.mark.parametrize(
    ("query", "parameters", "named"),
    [
        ("select * from t where a = :k limit :n", {"k": 1, "n": 2, "unused": 3}, None),
        ("select ? from t where a in (?, ?)", [1, 2, 3], None),
        ("select :k, :n from t", {"k": 1}, ":n"),
        ("select :k from t", [1], ":k"),
        ("select :k from t", None, ":k"),
        ("select ?, ? from t", [1], "2 parameters"),
        ("select ? from t", {"k": 1}, "a list"),
    ],
)
def test_parameter_without_a_value_is_named(query: str, parameters: Any, named: str | None) -> None:
    given = read_parameters(parameters) or ()
    if named is None:
        check_query(query, views={"t"}, parameters=given)
        return
    with pytest.raises(QueryRefusedError, match=named) as caught:
        check_query(query, views={"t"}, parameters=given)
    assert (caught.value.code, caught.value.error_code) == (400, "missing_parameter")
