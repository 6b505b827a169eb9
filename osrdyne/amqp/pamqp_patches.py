"""Patches of pamqp, the codec below aiormq; all of them are in this module (broker: pamqp-names).

pamqp 4.0.1 is stricter than the protocol and RabbitMQ, and it decodes before any code of osrdyne runs: one unusual byte
in a client's message would close the connection, and again after each reconnection. Each patch replaces one function of
the codec. `tests/unit/amqp/test_amqp_pamqp_patches.py` fails if the installed pamqp does not need one of them any more.

| patch | to be removed when pamqp |
|---|---|
| Queue and exchange names may hold anything but CR and LF: addresses of direct reply-to hold `=` | checks names no more strictly than RabbitMQ (<https://github.com/gmr/pamqp/issues/41>) |
| Strings that are not UTF-8 (routing keys, properties, header names) decode with `surrogateescape` and encode back to the same bytes, so that the request gets an error reply | decodes any short string, and encodes it back to the same bytes |
| Byte strings in header tables, as pamqp decodes them, can be encoded again | encodes `bytes` as a long string |
| Timestamps after 2106, in seconds or in milliseconds, decode as None: nothing real has them, and the unit is ambiguous when the message is sent on | decodes any 64-bit timestamp without an exception (<https://github.com/mosquito/aiormq/issues/186>) |
| Tables and arrays nested deeper than 32 levels decode as None: a message holds thousands of levels, and recursion ends the reader | bounds the depth of nested tables |
| A table is decoded in time that grows with its size, and at most 1,000 fields of it, nested ones included: pamqp copies the rest of the table for each field, so that 130 kB of small values took half a second of the event loop. Further fields are left out; a nested table or array that is cut decodes as None | decodes at an offset, and bounds the number of fields |
| Floats are encoded as doubles and not cut to 32 bits | encodes floats as `d` |
| NaN and infinities are encoded as nothing: RabbitMQ 3.10 closes the connection that publishes one (541) | refuses or drops them, or RabbitMQ 3.10 is no longer supported |
| An `Int64` is encoded with 64 bits, as the Java client does: offsets of streams have them | lets its caller choose the width of an integer |
"""  # noqa: E501

from __future__ import annotations

import math
import re
import struct
from datetime import UTC, datetime
from typing import Any

from pamqp import constants, decode, encode

LAST_TIMESTAMP = 0xFFFFFFFF
MAX_DEPTH = 32  # Levels of nested tables and arrays that are decoded; RabbitMQ's own headers have two.
MAX_FIELDS = 1000  # Fields and elements of one table that are decoded; RabbitMQ's own headers have less than a hundred.


class Int64(int):
    """An integer that is always encoded with 64 bits. pamqp takes the narrowest of six types instead."""


def decode_short_string(value: bytes) -> tuple[int, str]:
    if not value:
        raise ValueError("Could not unpack short string value")
    end = 1 + value[0]
    return end, value[1:end].decode("utf-8", "surrogateescape")


def decode_timestamp(value: bytes) -> tuple[int, datetime | None]:
    (seconds,) = struct.unpack(">Q", value[:8])
    if seconds > LAST_TIMESTAMP:  # milliseconds, as in pamqp
        seconds /= 1000
    return 8, datetime.fromtimestamp(seconds, tz=UTC) if seconds <= LAST_TIMESTAMP else None


def decode_table(value: bytes) -> tuple[int, dict[str, Any]]:
    table, end = _TableReader(value).read_table(0, depth=0)
    return end, table


def decode_array(value: bytes) -> tuple[int, list[Any] | None]:
    items, end = _TableReader(value).read_array(0, depth=0)
    return end, items


def decode_value(table: bytes, offset: int, end: int) -> tuple[Any, int]:
    """The value of a field at `offset` of a table that ends at `end`, and the offset behind it."""
    return _TableReader(table).read_value(offset, end, 0)


_WIDTHS = {
    **dict.fromkeys(b"V\0", 0), **dict.fromkeys(b"tbB", 1), **dict.fromkeys(b"su", 2), **dict.fromkeys(b"Iif", 4),
    **dict.fromkeys(b"D", 5), **dict.fromkeys(b"lLdT", 8),
}  # fmt: skip
"""Bytes of a value, by the byte of its type. Not here: strings, tables and arrays, which begin with their length."""


class _TableReader:
    """Reads one table or array at offsets, so that nothing is copied but the values. Methods return what they have read
    and the offset behind it."""

    def __init__(self, value: bytes) -> None:
        self._value = value
        self._left = MAX_FIELDS

    def read_table(self, offset: int, *, depth: int) -> tuple[dict[str, Any], int]:
        offset, end = self._range(offset)
        table: dict[str, Any] = {}
        while offset < end and self._left > 0:
            self._left -= 1
            used, name = decode_short_string(self._value[offset : min(end, offset + 256)])
            table[name], offset = self.read_value(offset + used, end, depth)
        return table, end

    def read_array(self, offset: int, *, depth: int) -> tuple[list[Any] | None, int]:
        offset, end = self._range(offset)
        items: list[Any] = []
        while offset < end and self._left > 0:
            self._left -= 1
            item, offset = self.read_value(offset, end, depth)
            items.append(item)
        return (items if offset >= end else None), end

    def read_value(self, offset: int, end: int, depth: int) -> tuple[Any, int]:
        if offset >= end:
            raise ValueError("Field table ends within a field")
        kind = self._value[offset]
        width = _WIDTHS.get(kind)
        if width is None and kind in b"SxFA":
            _, last = self._range(offset + 1)
            width = last - offset - 1
        if kind not in b"FA":
            # Of a type that is not known, pamqp raises the error.
            used, item = decode.embedded_value(self._value[offset : offset + 1 + (width or 0)])
            return item, offset + used
        if depth >= MAX_DEPTH:
            return None, offset + 1 + (width or 0)
        if kind == ord("A"):
            return self.read_array(offset + 1, depth=depth + 1)
        table, last = self.read_table(offset + 1, depth=depth + 1)
        return (table if self._left > 0 else None), last

    def _range(self, offset: int) -> tuple[int, int]:
        """The first offset of what has its length in front, and the one behind its end."""
        (length,) = struct.unpack_from(">I", self._value, offset)
        if offset + 4 + length > len(self._value):
            raise ValueError("Field table length exceeds data")
        return offset + 4, offset + 4 + length


def encode_string(encoder: struct.Struct, value: str) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"str required, received {type(value)}")
    raw = value.encode("utf-8", "surrogateescape")
    if encoder.size == 1 and len(raw) > 255:
        raise TypeError("string exceeds maximum length of 255 bytes")
    return encoder.pack(len(raw)) + raw


def encode_table(value: dict[str, Any]) -> bytes:
    if not value:
        return struct.pack(">I", 0)
    parts = []
    for name, item in value.items():
        parts += [encode.short_string(name), encode_table_value(item)]
    raw = b"".join(parts)
    return struct.pack(">I", len(raw)) + raw


def encode_table_value(value: Any) -> bytes:
    if isinstance(value, str):  # nearly all values, which pamqp tries fifth
        return b"S" + encode.long_string(value)
    if isinstance(value, bytes):
        return b"S" + struct.pack(">I", len(value)) + value
    if isinstance(value, Int64):
        return b"l" + struct.pack(">q", value)
    if isinstance(value, float):
        return b"d" + struct.pack(">d", value) if math.isfinite(value) else b"V"
    return _encode_table_value(value)


_encode_table_value = encode.encode_table_value


def apply() -> None:
    """Install the patches; calling it again changes nothing."""
    anything = re.compile(r"^[^\r\n]*$")
    constants.DOMAIN_REGEX["queue-name"] = anything
    constants.DOMAIN_REGEX["exchange-name"] = anything
    decode.METHODS |= {"shortstr": decode_short_string, "timestamp": decode_timestamp, "table": decode_table}
    decode.TABLE_MAPPING |= {b"T": decode_timestamp, b"F": decode_table, b"A": decode_array}
    encode.METHODS |= {"table": encode_table}
    decode.short_str = decode_short_string
    decode.timestamp = decode_timestamp  # type: ignore[assignment]
    decode.field_table = decode_table
    encode._string = encode_string
    encode.field_table = encode_table
    encode.encode_table_value = encode_table_value
