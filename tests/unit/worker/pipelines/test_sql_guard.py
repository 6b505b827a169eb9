"""What the SQL pipeline refuses without Spark; `tests/security/test_query_bombs.py` has the rest of the limits."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from case_tables import failures

from osrdyne_worker.pipelines.guard.functions import ALLOWED_FUNCTIONS, DENIED_FUNCTIONS, TABLE_FUNCTIONS
from osrdyne_worker.pipelines.guard.limits import (
    LimitExceededError,
    PlanLimits,
    check_limits,
    check_text,
    interval_microseconds,
)
from osrdyne_worker.pipelines.guard.refusals import QueryNotReadError, QueryRefusedError
from osrdyne_worker.pipelines.guard.sql_guard import TextLimits, check_query
from osrdyne_worker.pipelines.sql import Remembered

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


def test_attack_is_refused_with_its_code():
    def check(case):
        code, query = case
        assert refusal(query).error_code == code

    assert failures(REFUSED, check) == {}


def test_query_over_the_views_is_accepted():
    assert failures(ACCEPTED, lambda query: check_query(query, views=VIEWS)) == {}


@pytest.mark.parametrize("query", load("spark_only.yaml").values(), ids=load("spark_only.yaml"))
def test_query_that_sqlglot_cannot_read_is_left_to_the_plan(query):
    with pytest.raises(QueryNotReadError):
        check_query(query, views=VIEWS)


def test_denied_function_is_refused():
    for name in sorted(DENIED_FUNCTIONS):
        error = refusal(f"select {name}() from nation")
        assert (error.error_code, error.code) == ("function_not_allowed", 403), name
    assert not (ALLOWED_FUNCTIONS | TABLE_FUNCTIONS) & DENIED_FUNCTIONS.keys()


def test_refusal_names_its_place_and_the_views():
    unknown = refusal("select *\nfrom region,\n  secrets", views=frozenset({"region", "nation"}))
    assert unknown.details() == {"line": 3, "column": 3}
    assert "nation, region" in unknown.message
    assert refusal("select * from nation", views=frozenset()).error_code == unknown.error_code
    for query in ("select a b c from nation", "select upper() from nation"):
        wrong = refusal(query)
        assert (wrong.code, wrong.error_code) == (400, "syntax_error")
    assert refusal("select a b c from nation").details()["line"] == 1
    assert len(refusal("select * from csv.`" + "x" * 50_000 + "`").message) < 300


OPERATORS = "select cast(null as {}) where 1 < 2 and 2 > 1"


@pytest.mark.parametrize(
    ("opening", "inner", "closing", "query"),
    [
        *((opening, "1", ")", "select {}") for opening in ("(", "array(", "upper(")),
        ("case when true then ", "1", " end", "select {}"),
        ("(", "'", "", "select {}"),  # a text without tokens
        *((opening, "int", ">", OPERATORS) for opening in ("array<", "MAP <int, ", "struct<a: ")),
        ("array<", "int", ">", "from nation select cast(null as {})"),
    ],
)
def test_nesting_is_limited_before_a_parser_reads_it(opening, inner, closing, query):
    def nested(depth):
        return query.format(f"{opening * depth}{inner}{closing * depth}")

    with suppress(QueryNotReadError):
        check_query(nested(30), views=VIEWS)
    for depth in (31, 3000):
        assert refusal(nested(depth)).error_code == "query_too_complex"


@pytest.mark.parametrize("operator", ["not ", "- ", "~ "])
def test_length_is_limited_and_long_rows_of_prefix_operators_are_no_crash(operator):
    check_query("select 1", views=VIEWS, limits=TextLimits(length=8))
    assert refusal("select 1", limits=TextLimits(length=7)).error_code == "query_too_complex"
    assert refusal(f"select {operator * 20_000}true").error_code == "query_too_complex"


CATALYST = "org.apache.spark.sql.catalyst"


def test_limit_is_the_one_that_is_set():
    nodes: list[tuple[str, int, str, dict[str, object]]] = [
        ("plans.logical.Project", -1, "", {}),
        ("plans.logical.OneRowRelation", 0, "child", {}),
        ("analysis.UnresolvedFunction", 0, "projectList.0", {"nameParts": ["space"]}),
        ("expressions.Literal", 2, "children.0", {"value": 5_000, "dataType": "int"}),
    ]
    fields = ("class", "parent", "field", "values")
    common = {"kind": "tree", "nulls": []}
    plan = json.dumps([dict(zip(fields, (f"{CATALYST}.{kind}", *rest), strict=True)) | common for kind, *rest in nodes])
    check_limits(plan, PlanLimits(), views={})
    with pytest.raises(LimitExceededError) as caught:
        check_limits(plan, PlanLimits(max_constant_bytes=4_000), views={})
    assert caught.value.details() == {"setting": "max_constant_bytes", "limit": 4_000}


UNIONS = "select 1" + " union select 1" * 500


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("select 1 group by grouping sets (cube(a, b), c)", None),
        ("select 1 group by grouping sets (CUBE (a,b,c,d,e,f,g,h,i,j,k))", "max_grouping_sets"),
        ("select 1 group by grouping sets (cube /* ( */ ((a, x),b,c,d,e,f,g,h,i,j,k))", "max_grouping_sets"),
        ("select 'cube(a,b,c,d,e,f,g,h,i,j,k)'", None),
        ("select 1 group by rollup(a,b,c,d,e,f,g,h,i,j,k)", None),
        *((UNIONS + end, None) for end in ("", " '")),  # the second text cannot be read
        *((f"{UNIONS} union {UNIONS}{end}", "max_plan_nodes") for end in ("", " '")),
    ],
    ids=range(9),
)
def test_cubes_and_set_operations_are_counted_before_spark_parses_them(text, setting):
    with nullcontext() if setting is None else pytest.raises(LimitExceededError, match=setting):
        check_text(text, PlanLimits())


def test_interval_is_read():
    assert interval_microseconds("interval 1 hour 30 minutes") == 5_400e6
    assert [interval_microseconds(text) for text in ("1 day", "1 microsecond", "soon")] == [86_400e6, 1.0, None]


def test_what_is_remembered_is_bounded_and_what_was_begun_before_a_clear_is_not():
    """It may be a plan that reads files, made in the moment in which the data came into memory."""
    kept: Remembered[int] = Remembered(count=3, max_bytes=100)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: kept.get(number % 25, lambda: (number, 10 + number % 3)), range(4_000)))
    assert 0 < kept.bytes <= 100
    for number in range(5):
        kept.get(f"new {number}", lambda: (0, 20))
    assert (len(kept), kept.bytes) == (3, 60), "only the new ones are counted"
    kept.get("large", lambda: (0, 26))
    assert len(kept) == 3, "more than a quarter of the room is not kept"

    def make():
        kept.clear()
        return 1, 10

    assert kept.get("query", make) == 1
    assert kept.get("query", lambda: (2, 10)) == 2
