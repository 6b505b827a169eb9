"""The second net on descriptions of plans, without Spark."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from osrdyne_worker.pipelines.guard.plan_guard import check_analyzed, check_parsed
from osrdyne_worker.pipelines.guard.refusals import QueryRefusedError

CATALYST = "org.apache.spark.sql.catalyst."
LOGICAL = f"{CATALYST}plans.logical."
VIEWS = frozenset({"nation"})


class Plan:
    """Builds the description of a plan, as `PlanWalker.java` writes it."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []

    def add(self, kind: str, parent: int = -1, field: str = "child", *, nulls: Any = (), **values: Any) -> int:
        item = {"class": kind, "parent": parent, "field": field, "kind": "tree", "nulls": list(nulls), "values": values}
        self.nodes.append(item)
        return len(self.nodes) - 1

    def data(self, kind: str, parent: int, field: str, **values: Any) -> int:
        index = self.add(kind, parent, field, **values)
        self.nodes[index]["kind"] = "data"
        return index

    def relation(self, name: list[str], parent: int = -1, field: str = "child", *, streaming: bool = False) -> int:
        return self.add(
            f"{CATALYST}analysis.UnresolvedRelation", parent, field, multipartIdentifier=name, isStreaming=streaming
        )

    def function(self, name: list[str], parent: int = -1) -> int:
        return self.add(f"{CATALYST}analysis.UnresolvedFunction", parent, "projectList.0", nameParts=name)

    def common(self, with_: int, position: int, name: str) -> int:
        alias = self.add(f"{LOGICAL}SubqueryAlias", with_, f"cteRelations.{position}.1")
        self.data(f"{CATALYST}AliasIdentifier", alias, "identifier", name=name)
        return alias

    def view(self, parent: int, *, ours: bool) -> int:
        index = self.add(f"{LOGICAL}View", parent, isTempView=True)
        if ours:
            self.nodes[index]["ours"] = True
        return index

    def parsed(self) -> frozenset[str]:
        return check_parsed(json.dumps(self.nodes), views=VIEWS)

    def analyzed(self) -> None:
        check_analyzed(json.dumps(self.nodes))


@pytest.fixture
def plan():
    return Plan()


LEAF = "org.apache.spark.sql.execution.datasources.LogicalRelation"
PROJECT = f"{LOGICAL}Project"


def refusal(check: Callable[[], object]) -> str:
    with pytest.raises(QueryRefusedError) as caught:
        check()
    return caught.value.error_code


def test_query_over_a_view_is_accepted():
    plan = Plan()
    plan.relation(["Nation"], plan.add(PROJECT))
    assert plan.parsed() == {"nation"}
    plan = Plan()
    plan.view(plan.add(PROJECT), ours=True)
    plan.analyzed()


@pytest.mark.parametrize("recursive", [False, True])
def test_name_given_by_with_is_visible_behind_it_and_to_later_definitions(recursive):
    def plan(place, name):
        made = Plan()
        with_ = made.add(f"{LOGICAL}UnresolvedWith", allowRecursion=recursive)
        parents = {
            "query": made.add(PROJECT, with_),
            "first": made.common(with_, 0, "A"),
            "second": made.common(with_, 1, "b"),
        }
        made.relation([name], parents[place])
        return made

    for place, name in (("query", "a"), ("query", "B"), ("second", "a"), ("first", "nation")):
        assert plan(place, name).parsed() == {name} & VIEWS
    assert refusal(plan("first", "b").parsed) == "unknown_table"
    if recursive:
        plan("first", "a").parsed()
    else:
        assert refusal(plan("first", "a").parsed) == "unknown_table"
    outside = Plan()
    root = outside.add(PROJECT)
    outside.common(outside.add(f"{LOGICAL}UnresolvedWith", root, allowRecursion=recursive), 0, "a")
    outside.relation(["a"], root)
    assert refusal(outside.parsed) == "unknown_table"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        (["csv", "/etc/passwd"], "table_not_allowed"),
        (["default", "nation"], "table_not_allowed"),
        (["nation", "nation"], "table_not_allowed"),
        ([], "table_not_allowed"),
        (["secrets"], "unknown_table"),
        (["[nation]"], "unknown_table"),
        (["csv, /etc/passwd"], "unknown_table"),
        (["a.nation"], "unknown_table"),
    ],
)
def test_relation_that_is_not_a_view_is_refused(plan, name, code):
    plan.relation(name, plan.add(PROJECT))
    assert refusal(plan.parsed) == code


def test_relation_as_a_stream_or_with_options_is_refused(plan):
    relation = plan.relation(["nation"], streaming=True)
    assert refusal(plan.parsed) == "table_not_allowed"
    plan.nodes[relation]["values"] |= {"isStreaming": False, "options": 1}
    assert refusal(plan.parsed) == "syntax_not_allowed"
    hint = Plan()
    hint.relation(["nation"], hint.add(f"{LOGICAL}UnresolvedHint", name="SKEW"))
    assert refusal(hint.parsed) == "syntax_not_allowed"
    for field in ("plan", "windowDefinitions.0.1"):
        hidden = Plan()
        subquery = hidden.add(f"{CATALYST}expressions.ScalarSubquery", hidden.add(PROJECT), "projectList.0")
        hidden.relation(["csv", "/x"], subquery, field)
        assert refusal(hidden.parsed) == "table_not_allowed"


@pytest.mark.parametrize("name", [["java_method"], ["system", "builtin", "upper"], ["my_udf"], ["REFLECT"], []])
def test_function_that_is_not_allowed_is_refused(plan, name):
    plan.function(name, plan.add(PROJECT))
    assert refusal(plan.parsed) == "function_not_allowed"


def test_generator_with_a_schema_and_scalar_function_as_table_are_refused():
    plan = Plan()
    generator = plan.add(f"{CATALYST}analysis.UnresolvedGenerator")
    plan.data(f"{CATALYST}FunctionIdentifier", generator, "name", database="db", funcName="explode")
    assert refusal(plan.parsed) == "function_not_allowed"
    plan = Plan()
    plan.add(f"{CATALYST}analysis.UnresolvedTableValuedFunction", name=["upper"])
    assert refusal(plan.parsed) == "function_not_allowed"


@pytest.mark.parametrize(
    "name",
    [
        f"{LOGICAL}ScriptTransformation",
        f"{LOGICAL}InsertIntoStatement",
        f"{LOGICAL}ShowTables",
        f"{LOGICAL}ANodeOfTheFuture",
        f"{CATALYST}analysis.UnresolvedExecuteImmediate",
        f"{CATALYST}analysis.PlanWithUnresolvedIdentifier",
        f"{CATALYST}analysis.NamedParameter",
        f"{CATALYST}expressions.CallMethodViaReflection",
        f"{CATALYST}expressions.PythonUDF",
        "org.apache.spark.sql.execution.command.SetCommand",
        "org.apache.spark.sql.execution.datasources.LogicalRelation",
        "com.example.expressions.Anything",
    ],
)
def test_class_that_is_not_of_a_query_is_refused(plan, name):
    plan.add(name, plan.add(PROJECT))
    assert refusal(plan.parsed) == refusal(plan.analyzed) == "statement_not_allowed"


def test_null_where_nodes_belong_and_object_that_cannot_be_inspected_are_refused(plan):
    plan.add(PROJECT, nulls=["projectList"])
    found = [plan]
    for field in ("value", "exprBuilder"):
        opaque = Plan()
        opaque.nodes[opaque.add("com.example.Function1", opaque.add(PROJECT), field)]["kind"] = "opaque"
        found.append(opaque)
    for one in found:
        assert refusal(one.parsed) == refusal(one.analyzed) == "statement_not_allowed"


def test_stored_data_outside_of_our_views_and_view_made_by_the_parser_are_refused():
    foreign, ours, beside = Plan(), Plan(), Plan()
    foreign.view(foreign.add(PROJECT), ours=False)
    ours.view(ours.add(PROJECT), ours=True)
    join = beside.add(f"{LOGICAL}Join")
    beside.view(join, ours=True)
    beside.add(LEAF, join, "right")
    assert refusal(foreign.analyzed) == refusal(ours.parsed) == refusal(beside.analyzed) == "statement_not_allowed"
