"""The second check of a query: refuse Spark's plan of it unless it is a query over the views of the key.

Pure: it reads the complete description of a plan by `PlanWalker.java`. `check_parsed` runs before Spark analyses the
query (analysis evaluates constants and runs commands), `check_analyzed` before the query runs. Both are allow-lists of
node classes: a statement of a later Spark is refused until it has been reviewed. This check does not depend on
`sql_guard`, which may fail to parse a text that Spark accepts.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from osrdyne_worker.pipelines.guard.functions import ALLOWED_FUNCTIONS, DENIED_FUNCTIONS, TABLE_FUNCTIONS
from osrdyne_worker.pipelines.guard.refusals import QueryRefusedError
from osrdyne_worker.pipelines.guard.sql_guard import ALLOWED_HINTS

Node = dict[str, Any]

_CATALYST = "org.apache.spark.sql.catalyst."

_PLANS = """
    Aggregate AsOfJoin CTERelationDef CTERelationRef Deduplicate Distinct Except Expand Filter Generate GlobalLimit
    GlobalLimitAndOffset Intersect Join LateralJoin LimitAll LocalLimit LocalRelation Offset OneRowRelation Pivot
    NearestByJoin Project Range RebalancePartitions Repartition RepartitionByExpression ResolvedHint Sample Sort
    SubqueryAlias Union UnionLoop UnionLoopRef Unpivot UnresolvedHint UnresolvedWith View Window WithCTE
    WithWindowDefinition WindowGroupLimit
"""
_PLAN_NODES = frozenset(_PLANS.split())
"""Logical operators of a query. Excluded: commands, writers, scripts, and operators that read a source."""

_UNRESOLVED = """
    GroupingAnalytics Star TempResolvedColumn UnresolvedAlias UnresolvedAttribute UnresolvedDeserializer
    UnresolvedExtractValue UnresolvedFunction UnresolvedGenerator UnresolvedHaving UnresolvedInlineTable
    UnresolvedOrdinal UnresolvedQualify UnresolvedRegex UnresolvedRelation UnresolvedStar UnresolvedStarExcept
    UnresolvedStarExceptOrReplace UnresolvedStarWithColumns UnresolvedSubqueryColumnAliases UnresolvedTVFAliases
    UnresolvedTableValuedFunction UnresolvedTranspose MultiAlias NamedRelation OrderByAll UnresolvedGroupByAll
    ResolvedInlineTable UnresolvedOrderByAll
"""
_UNRESOLVED_NODES = frozenset(_UNRESOLVED.split())
"""Nodes that only Spark's parser creates. Excluded: IDENTIFIER clauses, parameters, EXECUTE IMMEDIATE."""

_PARTITIONINGS = frozenset({"HashPartitioning", "RangePartitioning", "RoundRobinPartitioning"})
"""Partitionings of DISTRIBUTE BY, CLUSTER BY and SORT BY."""

_FORBIDDEN = """
    ApplyFunctionExpression AvroDataToCatalyst CallMethodViaReflection CatalystDataToAvro CurrentCatalog CurrentDatabase
    CurrentPath CurrentUser ExternalUDF InputFileBlockLength InputFileBlockStart InputFileName ProtobufDataToCatalyst
    PythonUDAF PythonUDF PythonUDTF ScalaAggregator ScalaUDAF ScalaUDF SchemaOfAvro SchemaOfXml TryReflect
    VariableReference XmlToStructs
"""
_FORBIDDEN_EXPRESSIONS = frozenset(_FORBIDDEN.split())
"""Expressions that run code, read files or reveal the environment of the worker, under any function name."""

_FORBIDDEN_PACKAGES = ("expressions.xml.",)

_OPAQUE = frozenset({"java.util.UUID", "org.apache.spark.sql.types.Metadata", "scala.Enumeration$Val"})
"""Objects in the plan of a query that cannot contain plans or expressions."""

_OPAQUE_VALUES = frozenset(
    {
        "java.util.concurrent.atomic.AtomicReference",  # the run-time value of a lambda variable
        "org.apache.spark.unsafe.types.CalendarInterval",
        "org.apache.spark.unsafe.types.VariantVal",
    }
)
"""Further such objects, allowed only as the value of a literal or a variable."""


def check_parsed(description: str, *, views: Collection[str]) -> frozenset[str]:
    """Check the plan of Spark's parser; `views` in lower case. Returns those that the query may read. Raises
    `QueryRefusedError`."""
    nodes: list[Node] = json.loads(description)
    scopes = _Scopes(nodes)
    # A list of what is allowed: a function that a later Spark adds is refused until it was looked at.
    functions = ALLOWED_FUNCTIONS | TABLE_FUNCTIONS
    named: set[str] = set()
    for index, node in enumerate(nodes):
        _check_node(node)
        kind = _short_class(node)
        if kind == "View":
            raise _not_a_query(kind)
        if kind == "UnresolvedRelation":
            named.add(_check_relation(node, views, scopes.names_at(index)))
        elif kind == "UnresolvedFunction":
            _check_function(node["values"].get("nameParts"), functions)
        elif kind == "UnresolvedGenerator":
            _check_function(_generator_name(nodes, index), functions)
        elif kind == "UnresolvedTableValuedFunction":
            _check_function(node["values"].get("name"), TABLE_FUNCTIONS)
        elif kind == "UnresolvedHint" and str(node["values"].get("name")).lower() not in ALLOWED_HINTS:
            raise _refused("syntax_not_allowed", f"the hint {node['values'].get('name')!r} is not allowed")
    return frozenset(named.intersection(views))


def check_analyzed(description: str) -> None:
    """Check the plan of Spark's analyser: every leaf is a view of the key or contains no stored data.

    The walker marks the views of the key (`ours`) and leaves out the plans inside them.
    """
    for node in json.loads(description):
        _check_node(node)
        if _short_class(node) == "View" and node.get("ours") is not True:
            raise _not_a_query("a view that is not of this key")


class _Scopes:
    """The names of WITH clauses that are visible at a node, as Spark resolves them.

    In a definition, the earlier names of its clause are visible, and its own name only with RECURSIVE; in the query
    after the clause, all of them.
    """

    def __init__(self, nodes: list[Node]) -> None:
        self._nodes = nodes
        self._names: dict[int, dict[int, str]] = {}
        for node in nodes:
            holder = nodes[node["parent"]] if node["parent"] >= 0 else None
            if _short_class(node) == "AliasIdentifier" and holder is not None and node["field"] == "identifier":
                position = _definition(holder["field"])
                above = holder["parent"]
                if position is not None and above >= 0 and _short_class(nodes[above]) == "UnresolvedWith":
                    self._names.setdefault(above, {})[position] = str(node["values"].get("name")).lower()

    def names_at(self, index: int) -> Iterator[str]:
        """The visible names, in lower case."""
        while (parent := self._nodes[index]["parent"]) >= 0:
            names = self._names.get(parent)
            if names:
                own = _definition(self._nodes[index]["field"])
                recursive = self._nodes[parent]["values"].get("allowRecursion") is True
                for position, name in names.items():
                    if own is None or position < own or (recursive and position == own):
                        yield name
            index = parent


def _definition(field: str) -> int | None:
    """The position of a definition in its WITH clause, from the path of its field."""
    steps = field.split(".")
    return int(steps[1]) if steps[0] == "cteRelations" and len(steps) > 1 else None


def _generator_name(nodes: list[Node], index: int) -> list[str]:
    """The parts of a generator's name, which is a function identifier."""
    for node in nodes[index + 1 :]:
        if node["parent"] == index and node["field"] == "name":
            parts = [node["values"].get(part) for part in ("catalog", "database", "funcName")]
            return [str(part) for part in parts if part is not None]
    return []


def _short_class(node: Node) -> str:
    return str(node["class"]).rpartition(".")[2].rstrip("$")


def _check_node(node: Node) -> None:
    kind = node["kind"]
    if kind == "tree":
        _check_class(str(node["class"]))
        # A null in place of a node cannot be checked, and what cannot be checked is refused.
        if node["nulls"]:
            raise _refused(
                "statement_not_allowed", f"{_short_class(node)}.{node['nulls'][0]} is null and cannot be checked"
            )
    elif kind == "opaque" and node["class"] not in _OPAQUE:
        if node["class"] in _OPAQUE_VALUES and node["field"] == "value":
            return
        raise _not_a_query(_short_class(node))


def _check_class(full: str) -> None:
    package, _, name = full.removeprefix(_CATALYST).rpartition(".")
    name = name.rstrip("$")
    if full.startswith(_CATALYST):
        # By class, not by text: whatever syntax leads to a node, the node is what Spark would run.
        if package == "plans.logical" and name in _PLAN_NODES:
            return
        if package == "analysis" and name in _UNRESOLVED_NODES:
            return
        if package == "plans.physical" and name in _PARTITIONINGS:
            return
        # Expressions, in any subpackage: they contain no stored data.
        if package.split(".")[0] == "expressions" and name not in _FORBIDDEN_EXPRESSIONS:
            if f"{package}.".startswith(_FORBIDDEN_PACKAGES):
                raise _not_a_query(name)
            return
    raise _not_a_query(name)


def _check_relation(node: Node, views: Collection[str], common: Iterator[str]) -> str:
    """The name of the relation, in lower case: of a view, or of a common table."""
    name = node["values"].get("multipartIdentifier")
    if not isinstance(name, list) or len(name) != 1:
        shown = ".".join(name) if isinstance(name, list) else ""
        raise _refused("table_not_allowed", f"{shown[:60]!r} is not a view of this key")
    if name[0].lower() not in views and name[0].lower() not in common:
        raise QueryRefusedError(
            f"There is no view {name[0][:60]!r}; this key has {', '.join(sorted(views)) or 'none'}.",
            error_code="unknown_table",
            code=400,
        )
    if node["values"].get("isStreaming") is not False:
        raise _refused("table_not_allowed", "a view is not a stream")
    if node["values"].get("options"):
        raise _refused("syntax_not_allowed", "a view has no options; leave out WITH (...) after its name")
    return str(name[0].lower())


def _check_function(parts: object, allowed: Collection[str]) -> None:
    """Check the name of a function; a name with catalog or schema has several parts and is never allowed."""
    name = ".".join(str(part) for part in parts).lower() if isinstance(parts, list) else ""
    if not isinstance(parts, list) or len(parts) != 1 or name not in allowed:
        reason = DENIED_FUNCTIONS.get(name, "it is not known or not allowed here")
        raise _refused("function_not_allowed", f"the function {name[:60]!r} may not be called: {reason}")


def _not_a_query(name: str) -> QueryRefusedError:
    return _refused(
        "statement_not_allowed", f"Spark would run {name}, which is not part of a SELECT over this key's views"
    )


def _refused(error_code: str, reason: str) -> QueryRefusedError:
    return QueryRefusedError(f"The query is refused: {reason}.", error_code=error_code)
