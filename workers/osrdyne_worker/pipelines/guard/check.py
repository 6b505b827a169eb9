"""Decide whether a query may run: both checks (`sql_guard`, `plan_guard`), around Spark's parser and analyser.

Called by the SQL pipeline for every query. No part of a query is evaluated before its parsed plan has passed: Spark
evaluates constants and inline tables during analysis. Spark parses the text once, so it analyses the checked plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from osrdyne_worker.pipelines.guard.names import plain_names
from osrdyne_worker.pipelines.guard.plan_guard import check_analyzed, check_parsed
from osrdyne_worker.pipelines.guard.refusals import QueryNotReadError, QueryRefusedError
from osrdyne_worker.pipelines.guard.sql_guard import TextLimits, check_query
from osrdyne_worker.spark.parameters import Parameters, ParametersNotSupportedError
from osrdyne_worker.spark.plans import ParsedQuery, analyzed_plan, frame_of, parse_query


@dataclass(frozen=True, slots=True)
class CheckedQuery:
    """A query that may run: its DataFrame, the description of its analysed plan (None with Spark Connect), and the
    views that it names."""

    frame: Any
    analyzed: str | None
    named: frozenset[str]


def checked_query(
    session: Any,
    query: str,
    *,
    views: frozenset[str],
    limits: TextLimits,
    parameters: Parameters | None = None,
    check_plan: Callable[[ParsedQuery], None] | None = None,
    open_views: Callable[[frozenset[str]], None] | None = None,
    allow_unguarded: bool = False,
) -> CheckedQuery:
    """Check and analyse a query without running it. Raises `QueryRefusedError`, or Spark's error about the query.

    Qualified names of `views` are read as plain ones (`names`).

    `check_plan` may refuse the parsed plan as well, before anything is evaluated. `open_views` is called with the views
    that the accepted plan names, before its analysis. The values of `parameters` are in the plans that are checked.
    """
    # Before both checks, so that they and Spark see one text.
    if len(query) <= limits.length:
        plain = plain_names(query, views)
        query, views = plain.text, views | plain.information
    not_read: QueryNotReadError | None = None
    try:
        check_query(query, views=views, limits=limits, parameters=parameters or ())
    except QueryNotReadError as error:
        # Not refused yet: Spark's own parser decides about a text that sqlglot cannot read.
        not_read = error
    try:
        parsed = parse_query(session, query, parameters)
    except ParametersNotSupportedError:
        raise _no_parameters("This version of PySpark") from None
    except Exception:
        if not_read is not None and not_read.error_code == "syntax_error":
            raise not_read from None  # neither parser accepts the text; this message has the position
        raise
    # Without a plan only the text was checked, which is not enough: two parsers may read one text in two ways.
    if parsed is None:  # Spark Connect: only the first check is possible
        if not allow_unguarded:
            raise QueryRefusedError("The plan of the query cannot be checked.", error_code="statement_not_allowed")
        if not_read is not None:
            raise not_read
        if parameters is not None:
            raise _no_parameters("Spark Connect")
        if open_views is not None:
            open_views(views)
        return CheckedQuery(session.sql(query), None, views)
    # Before the analysis: analysing a plan may already read files or call functions.
    named = check_parsed(parsed.description, views=views)
    if check_plan is not None:
        check_plan(parsed)
    if open_views is not None:
        open_views(named)
    frame = frame_of(session, parsed)
    # Checked a second time: the analysis replaces names by what they stand for.
    analyzed = analyzed_plan(frame, views=views)
    assert analyzed is not None
    check_analyzed(analyzed)
    return CheckedQuery(frame, analyzed, named)


def _no_parameters(where: str) -> QueryRefusedError:
    return QueryRefusedError(
        f"{where} has no parameters that can be checked; write the values into the query.",
        error_code="parameters_not_supported",
        code=400,
    )
