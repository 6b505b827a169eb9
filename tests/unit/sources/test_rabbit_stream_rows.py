"""Rows of the source hold what a message had, as Arrow can."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

from pyspark.sql.pandas.types import to_arrow_schema

from osrdyne.amqp.stream_frames import StreamMessage
from osrdyne_sources.rabbit_stream.rows import ARROW_SCHEMA, SCHEMA, to_batch


def test_a_row_has_every_property_and_headers_as_text() -> None:
    when = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    nested = {"b": [True, b"x"], "a": Decimal("1.5")}
    headers = {"text": "ü", "number": 7, "bytes": b"\xff1", "null": None, "nested": nested, "when": when}
    full = StreamMessage(3, "x", "k\udcff", b"\x00", headers, "text/plain", "gzip", "c", "m", when, 4)
    first, second = to_batch("log", [full, StreamMessage(4, "", "", b"")]).to_pylist()
    assert (first["stream"], first["offset"], first["exchange"], first["routing_key"]) == ("log", 3, "x", "k\ufffd")
    assert (first["message_id"], first["correlation_id"]) == ("m", "c")
    assert (first["content_type"], first["content_encoding"], first["body"]) == ("text/plain", "gzip", b"\x00")
    assert first["timestamp"].timestamp() == when.timestamp()
    assert dict(first["headers"]) == {
        "text": "ü",
        "number": "7",
        "bytes": "\ufffd1",
        "null": None,
        "nested": '{"a": "1.5", "b": [true, "x"]}',
        "when": '"2026-01-02T03:04:05+00:00"',
    }
    assert (second["message_id"], second["timestamp"], second["headers"], second["body"]) == (None, None, [], b"")


def test_batches_have_the_schema_that_spark_expects() -> None:
    assert to_arrow_schema(SCHEMA, timezone="UTC").equals(ARROW_SCHEMA)
