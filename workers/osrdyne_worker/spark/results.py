"""Collect the rows of a query, and encode them as exact JSON values or as an Arrow IPC stream. Used by pipelines.

Spark returns Arrow batches in both cases: as fast as `collect` for few rows, much faster for many, and exact for all
types.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

_TEXT_ONLY = frozenset({"variant", "yearmonthinterval", "interval", "geometry", "geography", "void"})
"""Types without an exact Arrow type: Spark casts them to text."""


@dataclass(frozen=True, slots=True)
class Result:
    """The rows of a query up to its limit; `truncated`: there are more."""

    table: pa.Table
    types: tuple[tuple[str, str], ...]
    truncated: bool

    def to_json(self) -> bytes:
        """`{"columns": [{"name", "type"}], "rows": [[...]], "row_count": n, "truncated": false}`."""
        columns = [values_of(column) for column in self.table.columns]
        document = {
            "columns": [{"name": name, "type": kind} for name, kind in self.types],
            "rows": list(zip(*columns, strict=True)),
            "row_count": self.table.num_rows,
            "truncated": self.truncated,
        }
        return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()

    def to_arrow(self) -> bytes:
        """An Arrow IPC stream; the metadata of its schema holds `truncated` and `row_count`."""
        metadata = {"truncated": json.dumps(self.truncated), "row_count": str(self.table.num_rows)}
        table = self.table.replace_schema_metadata(metadata)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return bytes(sink.getvalue())


@dataclass(slots=True)
class PreparedQuery:
    """An analysed query. It may run any number of times, also in several threads at once.

    Spark optimises and plans each run anew. `frame` differs from the query in columns that are cast to text.
    """

    frame: Any
    types: tuple[tuple[str, str], ...]
    _schema: pa.Schema | None = field(default=None, init=False)
    """The schema of `toArrow`, after the first run."""

    def run(self, *, limit: int) -> Result:
        """Run the query for at most `limit` rows, plus one row to know whether there are more."""
        table = self._collect(self.frame.limit(limit + 1))
        return Result(table=table.slice(0, limit), types=self.types, truncated=table.num_rows > limit)

    def _collect(self, frame: Any) -> pa.Table:
        """The rows of `frame`.

        A third of the calls of `toArrow` to the JVM return the same each time. So `toArrow` runs once, and later runs
        call the method of pyspark below it, if this pyspark has it.
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
    """The same columns, those without an exact Arrow type as text. Selected by position, because names may repeat."""
    places = [f"c{place}" for place in range(len(fields))]
    columns = [
        (F.col(place).cast("string") if _needs_text(field.dataType) else F.col(place)).alias(field.name)
        for place, field in zip(places, fields, strict=True)
    ]
    return frame.toDF(*places).select(*columns)


def values_of(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """The values of an Arrow column as exact JSON values.

    Integers and text are unchanged. Decimals, dates, times and timestamps become text (ISO 8601, with zone if the type
    has one), binary values base64, `NaN` and the infinities their names. Structs and maps with text keys become
    objects, other maps lists of pairs.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # combine_chunks keeps several chunks if one would be too large
        return [value for chunk in column.chunks for value in values_of(chunk)]
    for is_kind, convert in _CONVERSIONS:
        if is_kind(column.type):
            return convert(column)
    values: list[Any] = column.to_pylist()
    return values


def _floats(column: pa.Array) -> list[Any]:
    return [value if value is None or math.isfinite(value) else _float_name(value) for value in column.to_pylist()]


def _float_name(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _decimals(column: pa.Array) -> list[Any]:
    return [None if value is None else format(value, "f") for value in column.to_pylist()]


def _binaries(column: pa.Array) -> list[Any]:
    return [None if value is None else base64.b64encode(value).decode("ascii") for value in column.to_pylist()]


def _dates_and_times(column: pa.Array) -> list[Any]:
    """Arrow's text: dates of Python end with the year 9999, dates of Spark do not."""
    texts = pc.cast(column, pa.string()).to_pylist()
    return [None if text is None else text.replace(" ", "T", 1).replace(".000000", "", 1) for text in texts]


def _durations(column: pa.Array) -> list[Any]:
    """ISO 8601, in seconds."""
    return [None if value is None else _duration(value) for value in pc.cast(column, pa.int64()).to_pylist()]


def _duration(microseconds: int) -> str:
    seconds, rest = divmod(abs(microseconds), 1_000_000)
    fraction = f".{rest:06d}".rstrip("0") if rest else ""
    return f"{'-' if microseconds < 0 else ''}PT{seconds}{fraction}S"


def _lists(column: pa.Array) -> list[Any]:
    values = values_of(column.flatten())
    found: list[Any] = []
    at = 0
    for length in pc.list_value_length(column).to_pylist():
        found.append(None if length is None else values[at : at + length])
        at += length or 0
    return found


def _maps(column: pa.Array) -> list[Any]:
    as_objects = pa.types.is_string(column.type.key_type)
    found: list[Any] = []
    # `.keys` and `.items` belong to the whole column even for a slice; the offsets count from the start of the column.
    keys, items = values_of(column.keys), values_of(column.items)
    offsets, valid = column.offsets.to_pylist(), column.is_valid().to_pylist()
    for here, (start, end) in enumerate(pairwise(offsets)):
        pairs = zip(keys[start:end], items[start:end], strict=True)
        found.append(None if not valid[here] else dict(pairs) if as_objects else [list(pair) for pair in pairs])
    return found


def _structs(column: pa.Array) -> list[Any]:
    names = [field.name for field in column.type]
    columns = [values_of(child) for child in column.flatten()]
    rows = zip(*columns, strict=True) if columns else iter([()] * len(column))
    valid = column.is_valid().to_pylist()
    return [dict(zip(names, row, strict=True)) if ok else None for ok, row in zip(valid, rows, strict=True)]


_CONVERSIONS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], list[Any]]], ...] = (
    (pa.types.is_floating, _floats),
    (pa.types.is_decimal, _decimals),
    (pa.types.is_binary, _binaries),
    (pa.types.is_large_binary, _binaries),
    (pa.types.is_date, _dates_and_times),
    (pa.types.is_timestamp, _dates_and_times),
    (pa.types.is_time, _dates_and_times),
    (pa.types.is_duration, _durations),
    (pa.types.is_map, _maps),
    (pa.types.is_list, _lists),
    (pa.types.is_large_list, _lists),
    (pa.types.is_struct, _structs),
)
