"""The limits of queries as far as they need no Spark; `tests/security/test_query_bombs.py` has the rest."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from osrdyne_worker.pipelines.guard.limits import (
    LimitExceededError,
    PlanLimits,
    check_limits,
    check_text,
    interval_microseconds,
)
from osrdyne_worker.pipelines.sql import Remembered

CATALYST = "org.apache.spark.sql.catalyst"


def literal(value: object, kind: str) -> dict[str, Any]:
    return {"class": f"{CATALYST}.expressions.Literal", "num-children": 0, "value": str(value), "dataType": kind}


def call(name: str, *arguments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    node = {
        "class": f"{CATALYST}.analysis.UnresolvedFunction",
        "num-children": len(arguments),
        "nameParts": f"[{name}]",
        "arguments": list(range(len(arguments))),
    }
    return [node, *(part for argument in arguments for part in argument)]


def select(*columns: list[dict[str, Any]]) -> str:
    one_row = {"class": f"{CATALYST}.plans.logical.OneRowRelation", "num-children": 0}
    project = {
        "class": f"{CATALYST}.plans.logical.Project", "num-children": 1, "projectList": list(columns), "child": 0,
    }  # fmt: skip
    return json.dumps([project, one_row])


def test_refusal_names_value_limit_and_setting_and_the_limit_is_the_one_that_is_set() -> None:
    plan = select(call("repeat", [literal("x", "string")], [literal(2_000_000_000, "integer")]))
    with pytest.raises(LimitExceededError) as caught:
        check_limits(plan, PlanLimits(), views={})
    assert "2,000,000,000" in caught.value.message
    assert caught.value.details() == {"setting": "max_constant_bytes", "limit": 16_777_216}
    plan = select(call("space", [literal(5_000, "integer")]))
    check_limits(plan, PlanLimits(), views={})
    with pytest.raises(LimitExceededError):
        check_limits(plan, PlanLimits(max_constant_bytes=4_000), views={})


def test_tree_of_any_depth_is_read() -> None:
    deep = [literal(1, "integer")]
    for _ in range(4_000):
        deep = [{"class": f"{CATALYST}.expressions.Add", "num-children": 2}, *deep, literal(1, "integer")]
    check_limits(select(deep), PlanLimits(), views={})
    with pytest.raises(LimitExceededError, match="max_constant_bytes"):
        large = call("multiply", deep, [literal(10_000, "integer")])
        check_limits(select(call("space", large)), PlanLimits(), views={})


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("select 1 group by grouping sets (cube(a, b), c)", True),
        ("select 1 group by grouping sets (CUBE (a,b,c,d,e,f,g,h,i,j,k))", False),
        ("select 1 group by grouping sets (cube /* ( */ ((a, x),b,c,d,e,f,g,h,i,j,k))", False),
        ("select 'cube(a,b,c,d,e,f,g,h,i,j,k)'", True),
        ("select 1 group by rollup(a,b,c,d,e,f,g,h,i,j,k)", True),
    ],
)
def test_cube_is_counted_before_spark_parses_it(text: str, passes: bool) -> None:
    if passes:
        return check_text(text, PlanLimits())
    with pytest.raises(LimitExceededError, match="max_grouping_sets"):
        check_text(text, PlanLimits())
    return None


@pytest.mark.parametrize("end", ["", " '"], ids=["text", "text that cannot be read"])
def test_set_operations_are_counted_before_spark_parses_them(end: str) -> None:
    check_text("select 1" + " union select 1" * 500 + end, PlanLimits())
    with pytest.raises(LimitExceededError, match="max_plan_nodes"):
        check_text("select 1" + " union select 1" * 1000 + end, PlanLimits())


@pytest.mark.parametrize(
    ("text", "microseconds"),
    [("1 day", 86_400e6), ("1 microsecond", 1.0), ("interval 1 hour 30 minutes", 5_400e6), ("soon", None)],
)
def test_interval_is_read(text: str, microseconds: float | None) -> None:
    assert interval_microseconds(text) == microseconds


def test_what_is_remembered_is_bounded_in_bytes_and_number() -> None:
    kept: Remembered[int] = Remembered(count=3, max_bytes=100)
    for number in range(5):
        kept.get(number, lambda number=number: (number, 20))  # type: ignore[misc]
    assert (len(kept), kept.bytes) == (3, 60)
    kept.get("large", lambda: (0, 26))
    assert len(kept) == 3, "more than a quarter of the room is not kept"


def test_value_that_was_begun_before_everything_was_forgotten_is_not_remembered() -> None:
    """It may be a plan that reads files, made in the moment in which the data came into memory."""
    kept: Remembered[str] = Remembered(count=2, max_bytes=1000)

    def make() -> tuple[str, int]:
        kept.clear()
        return "plan over files", 10

    assert kept.get("query", make) == "plan over files"
    assert kept.get("query", lambda: ("plan over memory", 10)) == "plan over memory"


def test_bytes_of_what_is_remembered_stay_right_with_many_threads() -> None:
    kept: Remembered[int] = Remembered(count=10, max_bytes=1000)
    together = threading.Barrier(8)

    def work(seed: int) -> None:
        together.wait(60)
        for step in range(500):
            kept.get((seed * step) % 25, lambda step=step: (step, 10 + step % 3))  # type: ignore[misc]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert 0 < kept.bytes <= 1000
    for number in range(10):
        kept.get(f"new {number}", lambda: (0, 7))
    assert (len(kept), kept.bytes) == (10, 70), "only the new ones are counted"
