"""Collect the rows of a query for an answer. Used by the session factory and by pipelines.

Spark returns Arrow batches: as fast as `collect` for few rows, much faster for many, and exact for all types.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from osrdyne_worker.app.tables import Rows, first_rows

_TEXT_ONLY = frozenset({"variant", "yearmonthinterval", "interval", "geometry", "geography", "void"})
"""Types without an exact Arrow type: Spark casts them to text."""


@dataclass(slots=True)
class PreparedQuery:
    """An analysed query. It may run any number of times, also in several threads at once.

    Spark optimises and plans each run anew. `frame` differs from the query in columns that are cast to text.
    """

    frame: Any
    types: tuple[tuple[str, str], ...]
    _schema: pa.Schema | None = field(default=None, init=False)
    """The schema of `toArrow`, after the first run."""

    def run(self, *, limit: int) -> Rows:
        """Run the query for at most `limit` rows, plus one row to know whether there are more."""
        table = self._collect(self.frame.limit(limit + 1))
        return Rows(table=first_rows(table, limit), types=self.types, truncated=table.num_rows > limit)

    def _collect(self, frame: Any) -> pa.Table:
        """The rows of `frame`.

        A third of the calls that `toArrow` makes to the JVM return the same result each time. So `toArrow` runs once,
        and later runs call the lower-level method of pyspark, if this version has it.
        """
        collect = getattr(frame, "_collect_as_arrow", None)
        if self._schema is None or collect is None:
            table = frame.toArrow()
            self._schema = table.schema
            return table
        batches = collect()
        return pa.Table.from_batches(batches).cast(self._schema) if batches else self._schema.empty_table()


def prepare(frame: Any) -> PreparedQuery:
    """Prepare the query of a DataFrame without running it."""
    fields = frame.schema.fields
    types = tuple((field.name, field.dataType.simpleString()) for field in fields)
    if any(_needs_text(field.dataType) for field in fields):
        frame = _with_text(frame, fields)
    return PreparedQuery(frame, types)


def _needs_text(kind: DataType) -> bool:
    if isinstance(kind, ArrayType):
        return _needs_text(kind.elementType)
    if isinstance(kind, MapType):
        return _needs_text(kind.keyType) or _needs_text(kind.valueType)
    if isinstance(kind, StructType):
        return any(_needs_text(field.dataType) for field in kind.fields)
    return kind.typeName() in _TEXT_ONLY


def _with_text(frame: Any, fields: list[Any]) -> Any:
    """The same columns, with those without an exact Arrow type cast to text. Selected by position, because names may
    repeat."""
    places = [f"c{place}" for place in range(len(fields))]
    columns = [
        (F.col(place).cast("string") if _needs_text(field.dataType) else F.col(place)).alias(field.name)
        for place, field in zip(places, fields, strict=True)
    ]
    return frame.toDF(*places).select(*columns)
