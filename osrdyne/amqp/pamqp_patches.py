"""The patches of pamqp that osrdyne needs, all in this one place. Source: broker: pamqp-names.

pamqp is stricter than the protocol and than RabbitMQ, and its reader runs before any code of ours: one odd byte in
somebody's message would close our connection, again after every reconnection. Each patch replaces one codec function:

- names: queue and exchange names may hold anything but CR and LF (addresses of direct reply-to hold `=`);
- strings that are not UTF-8 (routing keys, properties, header names) decode with `surrogateescape` and encode back
  to the same bytes, so that such a request can be answered and not only dropped;
- byte strings in header tables, as pamqp itself decodes them, can be encoded again;
- timestamps after 2106, in seconds or in milliseconds, decode as None: nobody means them, and the unit of a later one
  could not be told when it is sent on;
- decimals are decoded signed, as they are encoded, so that each can be sent on;
- tables and arrays nested deeper than 32 levels decode as None: thousands of levels fit into one message, and the
  recursion over them would end the reader;
- floats are encoded as doubles and not cut to 32 bits; NaN and infinities as nothing, because RabbitMQ ends the
  connection that publishes one (541 on 3.10).
"""

from __future__ import annotations

import math
import re
import struct
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from pamqp import constants, decode, encode

LAST_TIMESTAMP = 0xFFFFFFFF
MAX_DEPTH = 32
"""Levels of tables and arrays inside one another that are read; RabbitMQ's own headers have two."""


def decode_short_string(value: bytes) -> tuple[int, str]:
    if not value:
        raise ValueError("Could not unpack short string value")
    end = 1 + value[0]
    return end, value[1:end].decode("utf-8", "surrogateescape")


def decode_timestamp(value: bytes) -> tuple[int, datetime | None]:
    (seconds,) = struct.unpack(">Q", value[:8])
    if seconds > LAST_TIMESTAMP:  # milliseconds then, as pamqp reads it
        seconds /= 1000
    return 8, datetime.fromtimestamp(seconds, tz=UTC) if seconds <= LAST_TIMESTAMP else None


def decode_table(value: bytes, depth: int = 0) -> tuple[int, dict[str, Any]]:
    (length,) = struct.unpack_from(">I", value)
    offset, end = 4, 4 + length
    if end > len(value):
        raise ValueError("Field table length exceeds data")
    table: dict[str, Any] = {}
    while offset < end:
        used, name = decode_short_string(value[offset:end])
        offset += used
        used, table[name] = decode_value(value[offset:end], depth)
        offset += used
    return end, table


def decode_array(value: bytes, depth: int = 0) -> tuple[int, list[Any]]:
    (length,) = struct.unpack_from(">I", value)
    offset, end = 4, 4 + length
    if end > len(value):
        raise ValueError("Field array length exceeds data")
    items: list[Any] = []
    while offset < end:
        used, item = decode_value(value[offset:end], depth)
        offset += used
        items.append(item)
    return end, items


def decode_value(value: bytes, depth: int) -> tuple[int, Any]:
    kind = value[:1]
    if kind not in {b"F", b"A"}:
        used, item = decode.embedded_value(value)
        return used, item
    if depth >= MAX_DEPTH:
        (length,) = struct.unpack_from(">I", value, 1)
        return 5 + length, None
    nested = decode_table if kind == b"F" else decode_array
    used, item = nested(value[1:], depth + 1)
    return 1 + used, item


def decode_decimal(value: bytes) -> tuple[int, Decimal]:
    scale, mantissa = struct.unpack_from(">Bi", value)
    return 5, Decimal(mantissa).scaleb(-scale)


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
    if isinstance(value, bytes):
        return b"S" + struct.pack(">I", len(value)) + value
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
    decode.TABLE_MAPPING |= {b"T": decode_timestamp, b"F": decode_table, b"A": decode_array, b"D": decode_decimal}
    encode.METHODS |= {"table": encode_table}
    decode.short_str = decode_short_string
    decode.timestamp = decode_timestamp  # type: ignore[assignment]
    decode.field_table = decode_table
    encode._string = encode_string
    encode.field_table = encode_table
    encode.encode_table_value = encode_table_value
