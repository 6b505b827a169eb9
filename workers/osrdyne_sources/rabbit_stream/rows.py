"""The rows of the source: its schema, and Arrow batches of messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyspark.sql.types import BinaryType, LongType, MapType, StringType, StructType, TimestampType

from osrdyne.amqp.stream_frames import StreamMessage

SCHEMA = (
    StructType()
    .add("stream", StringType())
    .add("offset", LongType())
    .add("exchange", StringType())
    .add("routing_key", StringType())
    .add("message_id", StringType())
    .add("correlation_id", StringType())
    .add("content_type", StringType())
    .add("content_encoding", StringType())
    .add("timestamp", TimestampType())
    .add("headers", MapType(StringType(), StringType()))
    .add("body", BinaryType())
)
"""Source: docs/reference/rabbitmq-stream-source.md."""

ARROW_SCHEMA = pa.schema(
    [
        ("stream", pa.string()),
        ("offset", pa.int64()),
        *((name, pa.string()) for name in SCHEMA.fieldNames()[2:8]),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("headers", pa.map_(pa.string(), pa.string())),
        ("body", pa.binary()),
    ]
)
"""What Spark expects for `SCHEMA`; it refuses batches with any other."""

_encode = json.JSONEncoder(ensure_ascii=False, sort_keys=True).encode


def to_batch(stream: str, messages: Sequence[StreamMessage]) -> pa.RecordBatch:
    """Build one batch."""
    columns: dict[str, list[Any]] = {
        "stream": [stream] * len(messages),
        "offset": [one.offset for one in messages],
        "exchange": [_text(one.exchange) for one in messages],
        "routing_key": [_text(one.routing_key) for one in messages],
        "message_id": [_text(one.message_id) for one in messages],
        "correlation_id": [_text(one.correlation_id) for one in messages],
        "content_type": [_text(one.content_type) for one in messages],
        "content_encoding": [_text(one.content_encoding) for one in messages],
        "timestamp": [one.timestamp for one in messages],
        "headers": [[(_text(name), _header(value)) for name, value in one.headers.items()] for one in messages],
        "body": [one.body for one in messages],
    }
    arrays = [pa.array(columns[column.name], type=column.type) for column in ARROW_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=ARROW_SCHEMA)


def _text(text: str | None) -> str | None:
    """Replace invalid UTF-8 by U+FFFD: Arrow and Spark accept valid text only."""
    if text is None or text.isascii():
        return text
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _header(value: object) -> str | None:
    """A header as text: text and null unchanged, numbers in digits, anything else as JSON."""
    if type(value) is str:
        return _text(value)
    if type(value) is int:  # not a bool
        return str(value)
    if value is None:
        return None
    if isinstance(value, str | bytes | bytearray):
        return str(_plain(value))
    return _text(_encode(_plain(value)))


def _plain(value: object) -> object:
    match value:
        case bytes() | bytearray():
            return bytes(value).decode("utf-8", "replace")
        case datetime():
            return value.isoformat()
        case Decimal():
            return str(value)
        case dict():
            return {str(name): _plain(item) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case str():
            return _text(value)
        case _:
            return value
