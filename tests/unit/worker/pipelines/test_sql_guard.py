"""The first net: what sqlglot lets the SQL pipeline refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from case_tables import failures

from osrdyne_worker.pipelines.guard.functions import ALLOWED_FUNCTIONS, DENIED_FUNCTIONS, TABLE_FUNCTIONS
from osrdyne_worker.pipelines.guard.refusals import QueryNotReadError, QueryRefusedError
from osrdyne_worker.pipelines.guard.sql_guard import TextLimits, check_query

QUERIES = Path(__file__).parents[3] / "queries"
VIEWS = frozenset({"customer", "lineitem", "nation", "orders", "part", "partsupp", "region", "supplier"})


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((QUERIES / name).read_text(encoding="utf-8"))
    return content


REFUSED = [(code, query) for code, queries in load("refused.yaml").items() for query in queries.values()]
ACCEPTED = [query for file in ("accepted.yaml", "tpch.yaml") for query in load(file).values()]


def refusal(query: str, *, views: frozenset[str] = VIEWS, limits: TextLimits | None = None) -> QueryRefusedError:
    with pytest.raises(QueryRefusedError) as caught:
        check_query(query, views=views, limits=limits)
    return caught.value


def test_attack_is_refused_with_its_code() -> None:
    def check(case: tuple[str, str]) -> None:
        code, query = case
        assert refusal(query).error_code == code

    assert failures(REFUSED, check) == {}


def test_query_over_the_views_is_accepted() -> None:
    assert failures(ACCEPTED, lambda query: check_query(query, views=VIEWS)) == {}


@pytest.mark.parametrize("query", load("spark_only.yaml").values(), ids=load("spark_only.yaml"))
def test_query_that_sqlglot_cannot_read_is_left_to_the_plan(query: str) -> None:
    with pytest.raises(QueryNotReadError):
        check_query(query, views=VIEWS)


def test_text_without_tokens_is_still_limited_in_its_nesting() -> None:
    with pytest.raises(QueryNotReadError):
        check_query("select " + "(" * 30 + "'", views=VIEWS)
    assert refusal("select " + "(" * 31 + "'").error_code == "query_too_complex"


def test_denied_function_is_refused() -> None:
    for name in sorted(DENIED_FUNCTIONS):
        error = refusal(f"select {name}() from nation")
        assert (error.error_code, error.code) == ("function_not_allowed", 403), name
    assert not (ALLOWED_FUNCTIONS | TABLE_FUNCTIONS) & DENIED_FUNCTIONS.keys()


def test_refusal_names_its_place_and_the_views() -> None:
    unknown = refusal("select *\nfrom region,\n  secrets", views=frozenset({"region", "nation"}))
    assert unknown.details() == {"line": 3, "column": 3}
    assert "nation, region" in unknown.message
    assert refusal("select * from nation", views=frozenset()).error_code == unknown.error_code
    for query in ("select a b c from nation", "select upper() from nation"):
        wrong = refusal(query)
        assert (wrong.code, wrong.error_code) == (400, "syntax_error")
    assert refusal("select a b c from nation").details()["line"] == 1


def test_query_at_the_length_limit_is_accepted() -> None:
    query = "select 1"
    check_query(query, views=VIEWS, limits=TextLimits(length=len(query)))
    assert refusal(query, limits=TextLimits(length=len(query) - 1)).error_code == "query_too_complex"


@pytest.mark.parametrize(
    ("opening", "closing"),
    [("(", ")"), ("array(", ")"), ("case when true then ", " end"), ("upper(", ")")],
    ids=["brackets", "arrays", "case", "calls"],
)
def test_nesting_up_to_the_limit_is_accepted_and_more_is_refused(opening: str, closing: str) -> None:
    def nested(depth: int) -> str:
        return f"select {opening * depth}1{closing * depth}"

    check_query(nested(30), views=VIEWS)
    assert refusal(nested(31)).error_code == "query_too_complex"
    assert refusal(nested(3000)).error_code == "query_too_complex"


@pytest.mark.parametrize("operator", ["not ", "- ", "~ "])
def test_long_row_of_prefix_operators_is_refused_and_not_a_crash(operator: str) -> None:
    assert refusal(f"select {operator * 20_000}true").error_code == "query_too_complex"


def test_message_of_a_refusal_stays_short() -> None:
    assert len(refusal("select * from csv.`" + "x" * 50_000 + "`").message) < 300
