"""Rows as an answer: exact JSON values, or an Arrow IPC stream. Pure; needs pyarrow, so it is imported on first use.

`rows_of` reads objects with Arrow's C stream interface (pyarrow, pandas, polars) and iterators of record batches. The
rows of a Spark DataFrame come from the application's `SessionFactory`.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from osrdyne.protocol.messages import ARROW_TYPE, JSON_TYPE, wants_arrow
from osrdyne_worker.app.call import Answer
from osrdyne_worker.app.errors import RequestError


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows up to a limit; `types` are (name, type as Spark names it); `truncated`: there are more rows. `facts`:
    further values for the JSON object, and for the metadata of the Arrow schema."""

    table: pa.Table
    types: tuple[tuple[str, str], ...]
    truncated: bool
    facts: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """`{"columns": [{"name", "type"}], "rows": [[...]], "row_count": n, "truncated": false}`."""
        columns = [values_of(column) for column in self.table.columns]
        document = {
            "columns": [{"name": name, "type": kind} for name, kind in self.types],
            "rows": list(zip(*columns, strict=True)) if columns else [()] * self.table.num_rows,
            "row_count": self.table.num_rows,
            "truncated": self.truncated,
            **self.facts,
        }
        return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()

    def to_arrow(self) -> bytes:
        """An Arrow IPC stream; the metadata of its schema holds `truncated` and `row_count`."""
        facts = {"truncated": self.truncated, "row_count": self.table.num_rows, **self.facts}
        metadata = {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in facts.items()
            if value is not None
        }
        table = self.table.replace_schema_metadata(metadata)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return bytes(sink.getvalue())

    def answer(self, answer: Answer, *, accept: str | None) -> Answer:
        """`answer` with these rows as its body, in its content type or the one that the caller accepts.

        Raises `RequestError` (500) for a column that the format cannot hold.
        """
        content_type = answer.content_type or (ARROW_TYPE if wants_arrow(accept) else JSON_TYPE)
        encode = {ARROW_TYPE: self.to_arrow, JSON_TYPE: self.to_json}.get(content_type)
        if encode is None:
            raise invalid_answer(f"rows cannot be sent as {content_type}; use {JSON_TYPE} or {ARROW_TYPE}")
        headers = {"x-truncated": "true" if self.truncated else "false", **answer.headers}
        return Answer(encode(), content_type=content_type, code=answer.code, headers=headers)


def first_rows(table: pa.Table, limit: int) -> pa.Table:
    """At most `limit` rows. Arrow takes the length of a slice without columns for its number of rows."""
    return table.slice(0, min(limit, table.num_rows))


def invalid_answer(reason: str) -> RequestError:
    """The error for rows that cannot be encoded: a defect of the handler."""
    return RequestError(f"The answer cannot be encoded: {reason}.", code=500, error_code="invalid_answer")


def rows_of(value: Any, *, limit: int) -> Rows | Iterator[Any] | None:
    """The first `limit` rows of a table or of an iterator of record batches; None if `value` is neither.

    For an iterator of other values, returns an equivalent iterator that still yields all of them. Raises `RequestError`
    (500) for a table without an Arrow form, and what the iterator raises.
    """
    if not isinstance(value, Iterator) or hasattr(type(value), "__arrow_c_stream__"):
        return _limited(reader, reader.schema, limit) if (reader := reader_of(value)) is not None else None
    for first in value:
        reader = reader_of(first)
        if reader is None:
            return chain([first], value)
        try:
            batches = chain.from_iterable(chain([reader], map(known_reader, value)))
            return _limited(batches, reader.schema, limit)
        finally:
            close = getattr(value, "close", None)
            if close is not None:  # a generator that was not read to its end may hold files open
                close()
    return iter(())


def known_reader(value: Any) -> pa.RecordBatchReader:
    reader = reader_of(value)
    if reader is None:
        raise invalid_answer(f"an iterator of record batches returned {type(value).__name__}")
    return reader


def reader_of(value: Any) -> pa.RecordBatchReader | None:
    """The record batches of a table; None if `value` is not a table."""
    kind = type(value)
    try:
        if kind.__module__.startswith("pandas.") and kind.__name__ == "DataFrame":
            # The index is not a column: answers of pandas and Spark have the same form.
            return pa.Table.from_pandas(value, preserve_index=False).to_reader()
        if hasattr(kind, "__arrow_c_stream__"):
            return pa.RecordBatchReader.from_stream(value)
        if hasattr(kind, "__arrow_c_array__"):
            batch = pa.record_batch(value)
            return pa.RecordBatchReader.from_batches(batch.schema, [batch])
    except (pa.ArrowException, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:500]
        raise invalid_answer(f"{kind.__name__} has no Arrow form ({reason})") from error
    return None


def _limited(batches: Iterable[pa.RecordBatch], schema: pa.Schema, limit: int) -> Rows:
    """Read until there is one row more than `limit`."""
    found: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        if not batch.schema.equals(schema):
            raise invalid_answer("the record batches differ in their schemas")
        found.append(batch)
        count += batch.num_rows
        if count > limit:
            break
    types = tuple((field.name, type_name(field.type)) for field in schema)
    return Rows(first_rows(pa.Table.from_batches(found, schema), limit), types, truncated=count > limit)


# -- types -------------------------------------------------------------------------------------------------------------

_TYPE_NAMES = {
    pa.null(): "void",
    pa.bool_(): "boolean",
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.date32(): "date",
    pa.date64(): "date",
}
_TIME_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}


def type_name(kind: pa.DataType) -> str:
    """The name of an Arrow type in Spark SQL; Arrow's own name for a type that Spark does not have."""
    if kind in _TYPE_NAMES:
        return _TYPE_NAMES[kind]
    for is_kind, name in _TYPE_NAMERS:
        if is_kind(kind):
            return name(kind)
    return str(kind)


def _fields(kind: pa.DataType) -> Iterator[pa.Field]:
    return (kind.field(place) for place in range(kind.num_fields))


_TYPE_NAMERS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType], str]], ...] = (
    (lambda kind: isinstance(kind, pa.BaseExtensionType), lambda kind: type_name(kind.storage_type)),
    (pa.types.is_dictionary, lambda kind: type_name(kind.value_type)),
    (pa.types.is_decimal, lambda kind: f"decimal({kind.precision},{kind.scale})"),
    (pa.types.is_timestamp, lambda kind: "timestamp" if kind.tz else "timestamp_ntz"),
    (pa.types.is_time, lambda kind: f"time({_TIME_DIGITS[kind.unit]})"),
    (pa.types.is_duration, lambda kind: "interval day to second"),
    (lambda kind: _is_text(kind), lambda kind: "string"),
    (lambda kind: _is_binary(kind), lambda kind: "binary"),
    (lambda kind: _is_list(kind), lambda kind: f"array<{type_name(kind.value_type)}>"),
    (pa.types.is_map, lambda kind: f"map<{type_name(kind.key_type)},{type_name(kind.item_type)}>"),
    (
        pa.types.is_struct,
        lambda kind: f"struct<{','.join(f'{field.name}:{type_name(field.type)}' for field in _fields(kind))}>",
    ),
)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_binary(kind: pa.DataType) -> bool:
    checks = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    return any(check(kind) for check in checks)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


# -- values ------------------------------------------------------------------------------------------------------------


def values_of(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """The values of an Arrow column as exact JSON values.

    Integers and text are unchanged. Decimals, dates, times and timestamps become text (ISO 8601, with zone if the type
    has one), binary values base64, `NaN` and the infinities their names. Structs and maps with text keys become
    objects, other maps lists of pairs. Raises `RequestError` (500) for a type without such a form.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # combine_chunks keeps several chunks if one would be too large
        return [value for chunk in column.chunks for value in values_of(chunk)]
    for is_kind, convert in _CONVERSIONS:
        if is_kind(column.type):
            return convert(column)
    raise invalid_answer(f"JSON has no exact form for values of the Arrow type {column.type}")


def _is_plain(kind: pa.DataType) -> bool:
    checks = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_null, _is_text)
    return any(check(kind) for check in checks)


def _unchanged(column: pa.Array) -> list[Any]:
    values: list[Any] = column.to_pylist()
    return values


def _halves(column: pa.Array) -> list[Any]:
    return _floats(column.cast(pa.float32()))


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
    """Arrow's text: dates of Python end with the year 9999, dates of Spark do not. Timestamps with zone are in UTC."""
    kind = column.type
    if pa.types.is_timestamp(kind) and kind.tz not in (None, "UTC"):
        column = column.cast(pa.timestamp(kind.unit, "UTC"))
    if pa.types.is_time(kind):
        eras = [0] * len(column)
    else:
        column, eras = _without_eras(column)
    texts = [
        text if text is None else _with_year(text, era)
        for text, era in zip(pc.cast(column, pa.string()).to_pylist(), eras, strict=True)
    ]
    if getattr(kind, "unit", "us") == "us":
        return [None if text is None else text.replace(" ", "T", 1).replace(".000000", "", 1) for text in texts]
    return [None if text is None else _FRACTION.sub(_shortened, text.replace(" ", "T", 1), count=1) for text in texts]


_DAYS_OF_ERA, _YEARS_OF_ERA = 146_097, 400  # after which the Gregorian calendar repeats


def _without_eras(column: pa.Array) -> tuple[pa.Array, list[int]]:
    """The column with each year moved between 1970 and 2369, and by how many times 400 years: Arrow writes years beyond
    32767 as others, and dates beyond them as an error."""
    kind = column.type
    era = _DAYS_OF_ERA * {"date32[day]": 1, "date64[ms]": 86_400_000}.get(str(kind), 0)
    era = era or _DAYS_OF_ERA * 86_400 * _PER_SECOND[kind.unit]
    whole = pa.int32() if pa.types.is_date32(kind) else pa.int64()
    counts = column.cast(whole).to_pylist()
    eras = [0 if count is None else count // era for count in counts]
    if not any(eras):
        return column, eras
    moved = [None if count is None else count % era for count in counts]
    return pa.array(moved, whole).cast(kind), eras


def _with_year(text: str, era: int) -> str:
    """The text of a date with its year; ISO 8601 demands a sign before one beyond 9999."""
    if not era:
        return text
    year = int(text[:4]) + era * _YEARS_OF_ERA
    sign = "-" if year < 0 else "+" if year > 9999 else ""
    return f"{sign}{abs(year):04d}{text[4:]}"


_FRACTION = re.compile(r"\.(\d+)")


def _shortened(fraction: re.Match[str]) -> str:
    """A fraction of a second with no, 6 or 9 digits."""
    digits = fraction[1]
    if not digits.strip("0"):
        return ""
    return f".{digits[:6] if digits.endswith('000') else digits.ljust(6, '0')}"


_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def _durations(column: pa.Array) -> list[Any]:
    """ISO 8601, in seconds."""
    per_second = _PER_SECOND[column.type.unit]
    counts = pc.cast(column, pa.int64()).to_pylist()
    return [None if count is None else _duration(count, per_second) for count in counts]


def _duration(count: int, per_second: int) -> str:
    seconds, rest = divmod(abs(count), per_second)
    fraction = f".{rest:0{len(str(per_second)) - 1}d}".rstrip("0") if rest else ""
    return f"{'-' if count < 0 else ''}PT{seconds}{fraction}S"


def _lists(column: pa.Array) -> list[Any]:
    values = values_of(column.flatten())
    found: list[Any] = []
    at = 0
    for length in pc.list_value_length(column).to_pylist():
        found.append(None if length is None else values[at : at + length])
        at += length or 0
    return found


def _maps(column: pa.Array) -> list[Any]:
    as_objects = _is_text(column.type.key_type)
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
    (_is_plain, _unchanged),
    (pa.types.is_float16, _halves),
    (pa.types.is_floating, _floats),
    (pa.types.is_decimal, _decimals),
    (_is_binary, _binaries),
    (pa.types.is_date, _dates_and_times),
    (pa.types.is_timestamp, _dates_and_times),
    (pa.types.is_time, _dates_and_times),
    (pa.types.is_duration, _durations),
    (pa.types.is_map, _maps),
    (_is_list, _lists),
    (pa.types.is_struct, _structs),
    (pa.types.is_dictionary, lambda column: values_of(column.dictionary_decode())),
    (lambda kind: isinstance(kind, pa.BaseExtensionType), lambda column: values_of(column.storage)),
)
