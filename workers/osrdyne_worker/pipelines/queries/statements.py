"""The statements with which tools look at a database: SHOW, DESCRIBE and EXPLAIN.

They are answered from the views of the key. Spark runs none of them: it would list its own catalog. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

import pyarrow as pa

from osrdyne_worker.app.errors import RequestError
from osrdyne_worker.pipelines.guard.names import CATALOG, NAMESPACE
from osrdyne_worker.pipelines.views.loading import View

_NAME = r"(?:(?:`?spark_catalog`?\s*\.\s*)?`?default`?\s*\.\s*)?`?(?P<view>\w+)`?"
_END = r"\s*;?\s*\Z"
_PATTERN = r"(?:\s+(?:like\s+)?'(?P<pattern>[^']*)')?"
_WITHIN = r"(?:\s+(?:in|from)\s+`?(?P<namespace>\w+)`?)?"


def _statement(form: str) -> re.Pattern[str]:
    return re.compile(rf"\s*{form}", re.IGNORECASE | re.DOTALL)


_SHOW_VIEWS = _statement(rf"show\s+(?:tables|views){_WITHIN}{_PATTERN}{_END}")
_SHOW_NAMESPACES = _statement(rf"show\s+(?P<kind>databases|schemas|namespaces|catalogs){_PATTERN}{_END}")
_SHOW_COLUMNS = _statement(rf"show\s+columns\s+(?:in|from)\s+{_NAME}{_END}")
_DESCRIBE = _statement(rf"desc(?:ribe)?\s+(?:table\s+)?(?:(?:extended|formatted)\s+)?{_NAME}{_END}")
_EXPLAIN = _statement(
    r"explain\s+(?:(?P<mode>extended|codegen|cost|formatted)\s+)?(?P<query>(?:select|with|values|from|table|\().*)\Z"
)


def table_of(query: str, *, views: Callable[[], Sequence[View]], explain: Callable[[str, str], str]) -> pa.Table | None:
    """The answer to a statement; None for a text that is none of them. `explain`: the plan of a query in a mode.

    Raises `RequestError` for a view that the key does not have, and what `views` and `explain` raise.
    """
    if (found := _SHOW_VIEWS.match(query)) is not None:
        names = [] if found["namespace"] not in (None, NAMESPACE) else [view.name for view in views()]
        shown = [name for name in names if _matches(name, found["pattern"])]
        columns: dict[str, list[object]] = {
            "namespace": [NAMESPACE] * len(shown),
            "tableName": [*shown],
            "isTemporary": [True] * len(shown),
        }
        kinds = {"namespace": pa.string(), "tableName": pa.string(), "isTemporary": pa.bool_()}
        return pa.table({name: pa.array(values, kinds[name]) for name, values in columns.items()})
    if (found := _SHOW_NAMESPACES.match(query)) is not None:
        is_catalog = found["kind"].lower() == "catalogs"
        name = CATALOG if is_catalog else NAMESPACE
        shown = [name] if _matches(name, found["pattern"]) else []
        return _texts({"catalog" if is_catalog else "namespace": shown})
    if (found := _SHOW_COLUMNS.match(query)) is not None:
        return _texts({"col_name": [name for name, _, _ in _view(found["view"], views()).columns]})
    if (found := _DESCRIBE.match(query)) is not None:
        described = _view(found["view"], views()).columns
        return _texts(
            {
                "col_name": [name for name, _, _ in described],
                "data_type": [kind for _, kind, _ in described],
                "comment": [None] * len(described),
            }
        )
    if (found := _EXPLAIN.match(query)) is not None:
        return _texts({"plan": [explain(found["query"], (found["mode"] or "simple").lower())]})
    return None


def _matches(name: str, pattern: str | None) -> bool:
    """As Spark: `*` is any text, `|` separates alternatives; tools write `%` as in LIKE."""
    if pattern is None:
        return True
    return any(fnmatchcase(name, one.strip().lower().replace("%", "*")) for one in pattern.split("|"))


def _view(name: str, views: Sequence[View]) -> View:
    found = next((view for view in views if view.name == name.lower()), None)
    if found is None:
        raise RequestError(
            f"There is no view {name[:60]!r}; this key has {', '.join(sorted(view.name for view in views)) or 'none'}.",
            error_code="unknown_table",
        )
    if found.problem is not None:
        raise found.problem.refusal()
    return found


def _texts(columns: Mapping[str, Sequence[str | None]]) -> pa.Table:
    return pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})
