"""Decides whether a query may run: both nets, in their order, around Spark's parser and analyser.

Called by the SQL pipeline for every query. Nothing of a query is evaluated before the parsed plan has passed: Spark
evaluates constants and inline tables while it analyses. What was checked is what is analysed: the text is read once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from osrdyne_worker.pipelines.plan_guard import check_analyzed, check_parsed
from osrdyne_worker.pipelines.refusals import QueryNotReadError, QueryRefusedError
from osrdyne_worker.pipelines.sql_guard import Limits, check_query
from osrdyne_worker.spark.plans import ParsedQuery, analyzed_plan, frame_of, parse_query


@dataclass(frozen=True, slots=True)
class CheckedQuery:
    """A query that may run: its DataFrame, and the description of its analysed plan (None with Spark Connect)."""

    frame: Any
    analyzed: str | None


def checked_query(
    session: Any,
    query: str,
    *,
    views: frozenset[str],
    limits: Limits,
    check_plan: Callable[[ParsedQuery], None] | None = None,
    allow_unguarded: bool = False,
) -> CheckedQuery:
    """The checked query, analysed and not yet run. Raises `QueryRefusedError`, or what Spark says of the query.

    `check_plan` may refuse the parsed plan as well, before anything is evaluated.
    """
    not_read: QueryNotReadError | None = None
    try:
        check_query(query, views=views, limits=limits)
    except QueryNotReadError as error:
        not_read = error
    try:
        parsed = parse_query(session, query)
    except Exception:
        if not_read is not None and not_read.error_code == "syntax_error":
            raise not_read from None  # neither parser reads it; this message has the position
        raise
    if parsed is None:  # Spark Connect: there is the first net only
        if not allow_unguarded:
            raise QueryRefusedError("The plan of the query cannot be checked.", error_code="statement_not_allowed")
        if not_read is not None:
            raise not_read
        return CheckedQuery(session.sql(query), None)
    check_parsed(parsed.description, views=views)
    if check_plan is not None:
        check_plan(parsed)
    frame = frame_of(session, parsed)
    analyzed = analyzed_plan(frame, views=views)
    assert analyzed is not None
    check_analyzed(analyzed)
    return CheckedQuery(frame, analyzed)
