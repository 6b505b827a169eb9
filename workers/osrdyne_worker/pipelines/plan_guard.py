"""The second net: reads the plan that Spark made of a query and refuses what is not over the views of the key.

Pure: it gets the plan as Spark's own JSON (`TreeNode.toJSON`). The SQL pipeline calls `check_parsed` before the query
is given to `spark.sql` (which runs commands at once), and `check_analyzed` before it is run. Both are allow-lists of
node classes, so that a statement of a later Spark is refused until somebody has read what it does.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from osrdyne_worker.pipelines.functions import ALLOWED_FUNCTIONS, DENIED_FUNCTIONS, TABLE_FUNCTIONS
from osrdyne_worker.pipelines.refusals import QueryRefusedError
from osrdyne_worker.pipelines.sql_guard import JOIN_HINTS

Node = dict[str, Any]

_CATALYST = "org.apache.spark.sql.catalyst."

_PLANS = """
    Aggregate AsOfJoin CTERelationDef CTERelationRef Deduplicate Distinct Except Expand Filter Generate GlobalLimit
    GlobalLimitAndOffset Intersect Join LateralJoin LimitAll LocalLimit LocalRelation Offset OneRowRelation Pivot
    Project Range RepartitionByExpression ResolvedHint Sample Sort SubqueryAlias Union UnionLoop UnionLoopRef Unpivot
    UnresolvedHint UnresolvedWith Window WithCTE WithWindowDefinition WindowGroupLimit
"""
_PLAN_NODES = frozenset(_PLANS.split())
"""Logical operators of a query. Not here: commands, writers, scripts, pipes, and whatever reads a source."""

_UNRESOLVED = """
    GroupingAnalytics Star UnresolvedAlias UnresolvedAttribute UnresolvedDeserializer UnresolvedExtractValue
    UnresolvedFunction UnresolvedGenerator UnresolvedHaving UnresolvedInlineTable UnresolvedOrdinal UnresolvedRegex
    UnresolvedRelation UnresolvedStar UnresolvedStarExcept UnresolvedStarExceptOrReplace UnresolvedStarWithColumns
    UnresolvedSubqueryColumnAliases UnresolvedTVFAliases UnresolvedTableValuedFunction UnresolvedTranspose
    MultiAlias NamedRelation OrderByAll UnresolvedGroupByAll ResolvedInlineTable UnresolvedOrderByAll
"""
_UNRESOLVED_NODES = frozenset(_UNRESOLVED.split())
"""Nodes that only Spark's parser makes. Not here: IDENTIFIER clauses, parameters, EXECUTE IMMEDIATE."""

_FORBIDDEN = """
    ApplyFunctionExpression AvroDataToCatalyst CallMethodViaReflection CatalystDataToAvro CurrentCatalog CurrentDatabase
    CurrentPath CurrentUser ExternalUDF InputFileBlockLength InputFileBlockStart InputFileName ProtobufDataToCatalyst
    PythonUDAF PythonUDF PythonUDTF ScalaAggregator ScalaUDAF ScalaUDF SchemaOfAvro SchemaOfXml TryReflect
    VariableReference XmlToStructs
"""
_FORBIDDEN_EXPRESSIONS = frozenset(_FORBIDDEN.split())
"""Expressions that run code, read files or show where the worker runs, by whatever name they were called."""


def check_parsed(plan_json: str, *, views: Collection[str]) -> None:
    """Check what Spark's parser read; `views` in lower case. Raises `QueryRefusedError`."""
    nodes = list(_all_nodes(json.loads(plan_json), views=()))
    names = {_bracketed(alias) for node in nodes for alias in _aliases(node)} | {_bracketed(view) for view in views}
    for node in nodes:
        _check_class(node)
        kind = _short_class(node)
        if kind == "UnresolvedRelation":
            _check_relation(node, names)
        elif kind in ("UnresolvedFunction", "UnresolvedGenerator"):
            _check_function(_function_name(node), ALLOWED_FUNCTIONS | TABLE_FUNCTIONS)
        elif kind == "UnresolvedTableValuedFunction":
            _check_function(_function_name(node), TABLE_FUNCTIONS)
        elif kind == "UnresolvedHint" and str(node.get("name")).lower() not in JOIN_HINTS:
            raise _refused("syntax_not_allowed", f"the hint {node.get('name')!r} is not allowed")


def check_analyzed(plan_json: str, *, views: Collection[str]) -> None:
    """Check what Spark's analyser made of it: every leaf is a view of the key or holds no stored data."""
    for node in _all_nodes(json.loads(plan_json), views=views):
        _check_class(node)


def _all_nodes(tree: object, *, views: Collection[str]) -> Iterator[Node]:
    """Every node of a plan, of its expressions and of the plans inside them; what is below our views is left out."""
    pending: list[object] = [tree]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending.extend(_without_views(value, views))
        elif isinstance(value, dict):
            if "class" in value:
                yield value
            pending.extend(value.values())


def _without_views(items: list[Any], views: Collection[str]) -> Iterator[object]:
    """The items of a list; a tree comes as the list of its nodes, each followed by its children."""
    skip = 0
    for item in items:
        children = item.get("num-children", 0) if isinstance(item, dict) else 0
        if skip:
            skip += children - 1
        elif isinstance(item, dict) and _is_our_view(item, views):
            skip = children
        else:
            yield item


def _is_our_view(node: Node, views: Collection[str]) -> bool:
    if _short_class(node) != "View" or node.get("isTempView") is not True:
        return False
    identifier = node.get("desc", {}).get("identifier", {})
    return identifier.get("database") is None and str(identifier.get("table")).lower() in views


def _short_class(node: Node) -> str:
    return str(node.get("class")).rpartition(".")[2].rstrip("$")


def _check_class(node: Node) -> None:
    full = str(node["class"])
    package, _, name = full.removeprefix(_CATALYST).rpartition(".")
    name = name.rstrip("$")
    if full.startswith(_CATALYST):
        if package == "plans.logical" and name in _PLAN_NODES:
            return
        if package == "analysis" and name in _UNRESOLVED_NODES:
            return
        # The parser puts these into a package of plans or analysis; they are expressions and hold no data.
        if package.split(".")[0] == "expressions" and name not in _FORBIDDEN_EXPRESSIONS:
            return
    raise _refused(
        "statement_not_allowed", f"Spark would run {name}, which is not part of a SELECT over this key's views"
    )


def _check_relation(node: Node, names: Collection[str]) -> None:
    """`multipartIdentifier` comes as `[a, b]`; no view has a comma in its name, so this is unambiguous.

    Options (`WITH (...)`) are not in the JSON; Spark ignores those of a temporary view.
    """
    name = str(node.get("multipartIdentifier"))
    if name.lower() not in names:
        raise _refused("table_not_allowed", f"{name[1:61]!r} is not a view of this key")
    if node.get("isStreaming") is True:
        raise _refused("table_not_allowed", "a view is not a stream")


def _aliases(node: Node) -> Iterator[str]:
    """Names that a WITH clause may have given."""
    if _short_class(node) == "SubqueryAlias":
        yield str(node.get("identifier", {}).get("name"))


def _bracketed(name: str) -> str:
    return f"[{name.lower()}]"


def _function_name(node: Node) -> str:
    """`upper` out of `"[upper]"` or of a function identifier; a qualified name keeps its dots and is thus not known."""
    name = node.get("nameParts") or node.get("name")
    if isinstance(name, dict):
        parts = [name.get("catalog"), name.get("database"), name.get("funcName")]
        return ".".join(part for part in parts if part).lower()
    return str(name).removeprefix("[").removesuffix("]").lower()


def _check_function(name: str, allowed: Collection[str]) -> None:
    if name not in allowed:
        reason = DENIED_FUNCTIONS.get(name, "it is not known or not allowed here")
        raise _refused("function_not_allowed", f"the function {name[:60]!r} may not be called: {reason}")


def _refused(error_code: str, reason: str) -> QueryRefusedError:
    return QueryRefusedError(f"The query is refused: {reason}.", error_code=error_code)
