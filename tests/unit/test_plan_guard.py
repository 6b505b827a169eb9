"""The second net on plans as Spark writes them, without Spark."""

from __future__ import annotations

import json
from typing import Any

import pytest

from osrdyne_worker.pipelines.plan_guard import check_analyzed, check_parsed
from osrdyne_worker.pipelines.refusals import QueryRefusedError

CATALYST = "org.apache.spark.sql.catalyst."
LOGICAL = f"{CATALYST}plans.logical."
VIEWS = frozenset({"nation"})


def node(kind: str, children: int = 0, **fields: Any) -> dict[str, Any]:
    return {"class": kind, "num-children": children, **fields}


def relation(name: str, **fields: Any) -> dict[str, Any]:
    return node(f"{CATALYST}analysis.UnresolvedRelation", multipartIdentifier=name, **fields)


def function(name: str) -> dict[str, Any]:
    return node(f"{CATALYST}analysis.UnresolvedFunction", nameParts=name)


def view(name: str, **fields: Any) -> dict[str, Any]:
    return node(f"{LOGICAL}View", 1, desc={"identifier": {"table": name, **fields}}, isTempView=True)


LEAF = node("org.apache.spark.sql.execution.datasources.LogicalRelation")
PROJECT = node(f"{LOGICAL}Project", 1)


def refusal(check: Any, *nodes: Any) -> str:
    with pytest.raises(QueryRefusedError) as caught:
        check(json.dumps(list(nodes)), views=VIEWS)
    return caught.value.error_code


def test_query_over_a_view_is_accepted() -> None:
    check_parsed(json.dumps([PROJECT, relation("[Nation]", options={})]), views=VIEWS)
    check_analyzed(json.dumps([PROJECT, view("nation"), LEAF]), views=VIEWS)


def test_name_given_by_with_is_accepted() -> None:
    alias = node(f"{LOGICAL}SubqueryAlias", 1, identifier={"name": "a"})
    with_ = node(f"{LOGICAL}UnresolvedWith", 1, cteRelations=[{"_1": "a", "_2": [alias, relation("[nation]")]}])
    check_parsed(json.dumps([with_, PROJECT, relation("[a]")]), views=VIEWS)


@pytest.mark.parametrize("name", ["[csv, /etc/passwd]", "[default, nation]", "[secrets]", "[nation, nation]", "nation"])
def test_other_relation_is_refused(name: str) -> None:
    assert refusal(check_parsed, PROJECT, relation(name)) == "table_not_allowed"


def test_relation_as_a_stream_is_refused() -> None:
    assert refusal(check_parsed, relation("[nation]", isStreaming=True)) == "table_not_allowed"


def test_relation_inside_an_expression_is_refused() -> None:
    subquery = node(f"{CATALYST}expressions.ScalarSubquery", plan=[PROJECT, relation("[csv, /x]")])
    assert refusal(check_parsed, {**PROJECT, "projectList": [[subquery]]}, relation("[nation]")) == "table_not_allowed"


@pytest.mark.parametrize("name", ["[java_method]", "[system, builtin, upper]", "[my_udf]", "[REFLECT]"])
def test_function_that_is_not_allowed_is_refused(name: str) -> None:
    assert refusal(check_parsed, {**PROJECT, "projectList": [[function(name)]]}) == "function_not_allowed"


def test_generator_with_a_schema_is_refused() -> None:
    name = {"database": "db", "funcName": "explode"}
    assert refusal(check_parsed, node(f"{CATALYST}analysis.UnresolvedGenerator", name=name)) == "function_not_allowed"


def test_scalar_function_as_table_is_refused() -> None:
    table = node(f"{CATALYST}analysis.UnresolvedTableValuedFunction", name="[upper]")
    assert refusal(check_parsed, table) == "function_not_allowed"


@pytest.mark.parametrize(
    "name",
    [
        f"{LOGICAL}ScriptTransformation",
        f"{LOGICAL}InsertIntoStatement",
        f"{LOGICAL}CompoundBody",
        f"{LOGICAL}ShowTables",
        f"{LOGICAL}ANodeOfTheFuture",
        f"{CATALYST}analysis.UnresolvedExecuteImmediate",
        f"{CATALYST}analysis.PlanWithUnresolvedIdentifier",
        f"{CATALYST}analysis.NamedParameter",
        f"{CATALYST}expressions.CallMethodViaReflection",
        f"{CATALYST}expressions.CurrentUser",
        f"{CATALYST}expressions.PythonUDF",
        "org.apache.spark.sql.execution.command.SetCommand",
        "org.apache.spark.sql.execution.datasources.LogicalRelation",
        "org.apache.spark.sql.execution.datasources.v2.DataSourceV2Relation",
        "com.example.expressions.Anything",
    ],
)
def test_class_that_is_not_of_a_query_is_refused(name: str) -> None:
    assert refusal(check_parsed, PROJECT, node(name)) == "statement_not_allowed"
    assert refusal(check_analyzed, PROJECT, node(name)) == "statement_not_allowed"


def test_hint_that_starts_tasks_is_refused() -> None:
    hint = node(f"{LOGICAL}UnresolvedHint", 1, name="REPARTITION")
    assert refusal(check_parsed, hint, relation("[nation]")) == "syntax_not_allowed"


def test_stored_data_outside_of_a_view_is_refused() -> None:
    join = node(f"{LOGICAL}Join", 2)
    assert refusal(check_analyzed, join, view("nation"), LEAF, LEAF) == "statement_not_allowed"


@pytest.mark.parametrize(
    "other",
    [view("secrets"), view("nation", database="db"), {**view("nation"), "isTempView": False}],
    ids=["other name", "other schema", "permanent"],
)
def test_view_that_is_not_ours_is_refused(other: dict[str, Any]) -> None:
    assert refusal(check_analyzed, PROJECT, other, LEAF) == "statement_not_allowed"
