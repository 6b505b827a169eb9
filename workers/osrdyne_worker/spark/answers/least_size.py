"""The minimum size of an answer, from the plan of a query before it runs: pipelines refuse answers that cannot be sent.

Only what is certain counts: the shortest form of each value, and rows that the query returns in any case.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow.parquet as pq

from osrdyne_worker.spark.answers.results import PreparedQuery

MAX_FILES = 1000
"""Files whose numbers of rows are read."""
_SAME_ROWS = frozenset({"Project", "Sort", "Window", "SubqueryAlias", "View", "Repartition", "RepartitionByExpression"})
"""Operators that return as many rows as they get. If an expression fails, there is no answer."""
_LEAST_JSON = {"boolean": 4, "decimal": 3, "date": 4, "timestamp": 4, "timestamp_ntz": 4, "void": 4}
_LEAST_NUMBER = frozenset({"tinyint", "smallint", "int", "bigint", "float", "double"})
_ARROW = {
    "tinyint": 1,
    "smallint": 2,
    "int": 4,
    "bigint": 8,
    "float": 4,
    "double": 8,
    "decimal": 16,
    "date": 4,
    "timestamp": 8,
    "timestamp_ntz": 8,
    "string": 4,
    "binary": 4,
    "array": 4,
    "map": 4,
}
"""Bytes of a value whatever it is, null included. Of text and lists, the offset alone."""


def least_bytes(query: PreparedQuery, *, limit: int, arrow: bool, above: int) -> int | None:
    """Bytes that the rows of an answer need at least, if they need more than `above`; None if that is not certain.

    Reads the plan only if `limit` rows would be too large: for almost all queries this costs nothing.
    """
    row = least_row_bytes([kind for _, kind in query.types], arrow=arrow)
    if row * limit <= above:
        return None
    java_frame = getattr(query.frame, "_jdf", None)
    if java_frame is None:
        return None
    rows = _least_rows(java_frame.queryExecution().optimizedPlan())
    size = row * min(limit, rows)
    return size if size > above else None


def least_row_bytes(types: list[str], *, arrow: bool) -> int:
    """Bytes of the shortest row with columns of these types (`DataType.simpleString`)."""
    names = [kind.split("(")[0].split("<")[0] for kind in types]
    if arrow:
        return sum(_ARROW.get(name, 0) for name in names)
    # The shortest number is one digit, the shortest text, list or object two characters; and a comma or bracket each.
    return 1 + sum(1 if name in _LEAST_NUMBER else _LEAST_JSON.get(name, 2) for name in names) + len(names)


def _least_rows(plan: Any) -> int:
    """The rows that a plan returns at least; 0 if unknown."""
    kind = plan.getClass().getSimpleName()
    if kind in _SAME_ROWS:
        return _least_rows(plan.children().apply(0))
    if kind == "Union":
        children = plan.children()
        return sum(_least_rows(children.apply(place)) for place in range(children.size()))
    if kind in ("GlobalLimit", "LocalLimit"):
        limit = str(plan.limitExpr().toString())
        return min(int(limit), _least_rows(plan.children().apply(0))) if limit.isdecimal() else 0
    if kind == "Range":
        return int(str(plan.numElements()))
    if kind == "LocalRelation":
        return int(plan.data().size())
    if kind == "LogicalRelation":
        return _rows_of_files(plan.relation())
    return 0


def _rows_of_files(relation: Any) -> int:
    """The rows of a local Parquet table, from the footers of its files."""
    if relation.getClass().getSimpleName() != "HadoopFsRelation":
        return 0
    if relation.fileFormat().getClass().getSimpleName() != "ParquetFileFormat":
        return 0
    files = list(relation.location().inputFiles())
    parts = [urlsplit(str(file)) for file in files[:MAX_FILES]]
    if any(part.scheme != "file" for part in parts):
        return 0
    try:
        return sum(pq.read_metadata(unquote(part.path)).num_rows for part in parts)
    except (OSError, ValueError):  # Spark reports what is wrong with the file; pyarrow's errors have these two types
        return 0
