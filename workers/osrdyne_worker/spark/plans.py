"""Spark's own plans of a query, as text.

Used by pipelines to look at a query before it runs. With Spark Connect the plans stay on the server: None.
"""

from __future__ import annotations

from typing import Any

_SAMPLE = '"class":"org.apache.spark.sql.catalyst.plans.logical.Sample"'


def parsed_plan(session: Any, query: str) -> str | None:
    """What Spark's parser reads, as JSON; nothing is run or looked up."""
    java_session = getattr(session, "_jsparkSession", None)
    if java_session is None:
        return None
    return str(java_session.sessionState().sqlParser().parsePlan(query).toJSON())


def analyzed_plan(frame: Any) -> str | None:
    """What Spark's analyser made of a DataFrame, as JSON."""
    java_frame = getattr(frame, "_jdf", None)
    return None if java_frame is None else str(java_frame.queryExecution().analyzed().toJSON())


def is_repeatable(frame: Any, analyzed: str) -> bool:
    """Whether running the analysed plan (`analyzed` is its JSON) again is the same as running the text again.

    It is not where Spark has drawn a random seed: for `rand()` while it analyses, for TABLESAMPLE while it parses. The
    time of day is looked at later.
    """
    return _SAMPLE not in analyzed and bool(frame._jdf.queryExecution().analyzed().deterministic())


def explained_plan(frame: Any, mode: str) -> str:
    """The plan as `EXPLAIN` prints it; `mode` is one of Spark's (simple, extended, codegen, cost, formatted)."""
    java_frame = getattr(frame, "_jdf", None)
    if java_frame is None:
        return str(frame._explain_string(mode=mode))
    utils = frame.sparkSession._jvm.org.apache.spark.sql.api.python.PythonSQLUtils
    return str(utils.explainString(java_frame.queryExecution(), mode))
