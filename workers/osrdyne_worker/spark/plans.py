"""Spark's plans of a query, and a complete description of them as JSON.

Used by pipelines to check a query before it runs. With Spark Connect the plans stay on the server: None.
`TreeNode.toJSON` leaves out maps and unknown objects; hence `PlanWalker.java` writes the description.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from osrdyne_worker.spark.java.janino import compiled_method
from osrdyne_worker.spark.parameters import Parameters, parse_with_parameters

_ROWS = '"class":"org.apache.spark.sql.catalyst.plans.logical.LocalRelation"'
_SAMPLE = '"class":"org.apache.spark.sql.catalyst.plans.logical.Sample"'


@dataclass(frozen=True, slots=True)
class ParsedQuery:
    """The plan of Spark's parser (an object of the JVM), and its description."""

    plan: Any
    description: str


def parse_query(session: Any, query: str, parameters: Parameters | None = None) -> ParsedQuery | None:
    """Parse a query, with the values of its parameters. Spark evaluates and resolves nothing.

    Raises the error of Spark's parser, or `ParametersNotSupportedError`.
    """
    java_session = getattr(session, "_jsparkSession", None)
    if java_session is None:
        return None
    # The parser uses the settings of the session that is active in this thread.
    session._jvm.SparkSession.setActiveSession(java_session)
    parser = java_session.sessionState().sqlParser()
    plan = parser.parsePlan(query) if parameters is None else parse_with_parameters(session, parser, query, parameters)
    return ParsedQuery(plan, _description(session, plan, views=(), analyzed=False))


def frame_of(session: Any, parsed: ParsedQuery) -> Any:
    """Analyse a parsed plan; its DataFrame. The text is not parsed a second time."""
    from pyspark.sql.classic.dataframe import DataFrame

    java_frame = session._jvm.org.apache.spark.sql.classic.Dataset.ofRows(session._jsparkSession, parsed.plan)
    return DataFrame(java_frame, session)


def analyzed_plan(frame: Any, *, views: frozenset[str] = frozenset()) -> str | None:
    """The description of the analysed plan of a DataFrame, without the plans inside the `views`."""
    java_frame = getattr(frame, "_jdf", None)
    if java_frame is None:
        return None
    return _description(frame.sparkSession, java_frame.queryExecution().analyzed(), views=views, analyzed=True)


def is_repeatable(frame: Any, analyzed: str) -> bool:
    """Whether running the analysed plan again (`analyzed` is its description) gives the same result as running the text
    again.

    It does not if Spark has drawn a random seed: for `rand()` during analysis, for TABLESAMPLE during parsing. Current
    times are evaluated later. Plans with evaluated rows (VALUES) are excluded because of their size.
    """
    return (
        _SAMPLE not in analyzed
        and _ROWS not in analyzed
        and bool(frame._jdf.queryExecution().analyzed().deterministic())
    )


def memory_bytes(analyzed: str) -> int:
    """An estimate of the heap that an analysed plan occupies (`analyzed` is its JSON)."""
    return 2 * len(analyzed)


def explained_plan(frame: Any, mode: str) -> str:
    """The plan in the format of `EXPLAIN`; `mode`: simple, extended, codegen, cost or formatted."""
    java_frame = getattr(frame, "_jdf", None)
    if java_frame is None:
        return str(frame._explain_string(mode=mode))
    utils = frame.sparkSession._jvm.org.apache.spark.sql.api.python.PythonSQLUtils
    return str(utils.explainString(java_frame.queryExecution(), mode))


def load_plan_walker(session: Any) -> None:
    """Compile the walker: the first query does not wait for it, and a JVM that cannot compile it fails to start."""
    if getattr(session, "_jsparkSession", None) is not None:
        _walk_method(session.sparkContext._gateway)


def _description(session: Any, plan: Any, *, views: Collection[str], analyzed: bool) -> str:
    gateway = session.sparkContext._gateway
    names = gateway.jvm.java.util.HashSet()
    for view in views:
        names.add(view)
    arguments = gateway.new_array(gateway.jvm.Object, 3)
    arguments[0], arguments[1], arguments[2] = plan, names, analyzed
    return str(_walk_method(gateway).invoke(None, arguments))


@lru_cache(maxsize=1)
def _walk_method(gateway: Any) -> Any:
    return compiled_method(gateway, files(__package__) / "PlanWalker.java", "walk")
