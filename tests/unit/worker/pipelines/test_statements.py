"""Statements with which tools look at a database, answered from the views of the key."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne_worker import RequestError
from osrdyne_worker.pipelines.queries.statements import table_of
from osrdyne_worker.pipelines.views.loading import DataProblemError, View

COLUMNS = (("id", "bigint", True), ("Name", "string", True))
PROBLEM = DataProblemError("nanoseconds", code=500, error_code="dataset_unreadable")
VIEWS = (
    View("orders", "parquet", COLUMNS, cached=False),
    View("order_lines", "csv", (), cached=False),
    View("broken", "parquet", (), cached=False, problem=PROBLEM),
)


def answer(text: str) -> list[tuple[Any, ...]] | None:
    table = table_of(text, views=lambda: VIEWS, explain=lambda query, mode: f"{mode}: {query}")
    return None if table is None else list(zip(*(column.to_pylist() for column in table.columns), strict=True))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("show tables", ["orders", "order_lines", "broken"]),
        ("  SHOW\nVIEWS ; ", ["orders", "order_lines", "broken"]),
        ("show tables in `default`", ["orders", "order_lines", "broken"]),
        ("show tables from other", []),
        ("show tables like 'order*'", ["orders", "order_lines"]),
        ("show tables '%LINES|broken'", ["order_lines", "broken"]),
    ],
)
def test_views_are_shown_as_tables(text, shown):
    assert [row[1] for row in answer(text) or []] == shown


@pytest.mark.parametrize("name", ["orders", "ORDERS", "`orders`", "default.orders", "spark_catalog.default.orders"])
@pytest.mark.parametrize("verb", ["describe", "DESC", "describe table", "desc extended"])
def test_columns_are_described(verb, name):
    assert answer(f"{verb} {name};") == [("id", "bigint", None), ("Name", "string", None)]


def test_columns_databases_and_plans():
    assert answer("show columns in orders") == [("id",), ("Name",)]
    assert answer("show databases") == answer("show schemas like 'def*'") == [("default",)]
    assert answer("show catalogs") == [("spark_catalog",)]
    assert answer("explain select 1") == [("simple: select 1",)]
    for text, code in (("describe nothing", "unknown_table"), ("show columns from broken", "dataset_unreadable")):
        with pytest.raises(RequestError) as caught:
            answer(text)
        assert caught.value.error_code == code
    assert answer("EXPLAIN formatted\nwith a as (select 1) select * from a") == [
        ("formatted: with a as (select 1) select * from a",)
    ]


@pytest.mark.parametrize(
    "text",
    ["select 1", "show functions", "show tables; drop table t", "explain drop table t", "describe function now",
     "describe csv.`/etc/passwd`", "show create table orders", "select 'show tables'", "explain analyze table t"],
)  # fmt: skip
def test_other_statements_are_left_to_the_guard(text):
    assert answer(text) is None


@given(st.text(alphabet="show tablesdeicrxpn'`.;()%*\n", max_size=80))
def test_any_text_is_answered_or_left_to_the_guard(text):
    try:
        answer(text)
    except RequestError as error:
        assert error.error_code in {"unknown_table", "dataset_unreadable"}
