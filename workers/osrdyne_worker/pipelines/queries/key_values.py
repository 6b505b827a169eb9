"""The values of key columns in look-ups: JSON values as values of the column's type. Pure.

Values have the form in which `/sql` answers them, so that a value of an answer can be the key of a look-up.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

import pyarrow as pa

from osrdyne_worker import RequestError
from osrdyne_worker.pipelines.queries.parameters import read_value

KEY_TYPES = "boolean, integers, decimals, string, date, timestamp, timestamp_ntz and binary"


class UnequalError(Exception):
    """No value of the column's type can equal this one."""


def is_key_type(kind: str) -> bool:
    """Whether a column of Spark's type `kind` can be a key column.

    Floating-point numbers, and texts with a collation, may be equal although they differ.
    """
    return kind.startswith("decimal(") or kind in _READERS


def read_key_value(where: str, kind: str, value: Any) -> Any:
    """The value as a Python value that `arrow_type(kind)` can hold. Raises `RequestError` that names it by `where`, or
    `UnequalError`."""
    if value is None:
        return None
    if kind.startswith("decimal("):
        return _decimal(arrow_type(kind), where, value)
    return _READERS[kind](where, value)


def arrow_type(kind: str) -> pa.DataType:
    """The Arrow type of a key column."""
    if kind.startswith("decimal("):
        precision, scale = kind.removeprefix("decimal(").removesuffix(")").split(",")
        return pa.decimal128(int(precision), int(scale))
    return _ARROW_TYPES[kind]


def _boolean(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _invalid(where, "must be true, false or null")
    return value


def _integer(bits: int, where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _invalid(where, "must be a number without a fraction, or null")
    if not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
        raise UnequalError
    return value


def _decimal(kind: pa.Decimal128Type, where: str, value: Any) -> Decimal:
    # A number with a fraction has lost digits when it was read as JSON.
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _invalid(where, 'must be a decimal number as text, such as "12.50", or null')
    number = Decimal(str(read_value(where, "decimal", value).value))
    try:
        return Decimal(pa.scalar(number, kind).as_py())
    except pa.ArrowInvalid:  # more digits than the column has
        raise UnequalError from None


def _string(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _invalid(where, "must be text or null")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _invalid(where, "is not Unicode text") from None
    return value


def _text(kind: str, convert: Callable[[Any], Any], where: str, value: Any) -> Any:
    """A value that JSON writes as text, in the form of a parameter of this type."""
    if not isinstance(value, str):
        raise _invalid(where, f"must be a {kind} as text, or null")
    return convert(read_value(where, kind, value).value)


def _invalid(where: str, reason: str) -> RequestError:
    return RequestError(f"{where} {reason}.", 400, "invalid_parameter")


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "boolean": _boolean,
    "tinyint": partial(_integer, 8),
    "smallint": partial(_integer, 16),
    "int": partial(_integer, 32),
    "bigint": partial(_integer, 64),
    "string": _string,
    "date": partial(_text, "date", dt.date.fromisoformat),
    "timestamp": partial(_text, "timestamp", dt.datetime.fromisoformat),
    "timestamp_ntz": partial(_text, "timestamp_ntz", dt.datetime.fromisoformat),
    "binary": partial(_text, "binary", bytes),
}
_ARROW_TYPES = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "string": pa.string(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "binary": pa.binary(),
}
