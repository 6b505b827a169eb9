"""Turns messages of the log into Arrow tables: rows of the tables, and rows of `_invalid/`. Pure.

Source: docs/reference/telemetry/events.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from osrdyne.aio.tasks import collector_paused
from osrdyne.protocol.event_mapping import EVENTS as AS_THEY_ARE
from osrdyne.protocol.event_mapping import EventMapping
from osrdyne.protocol.events import Event, InvalidEvent, enqueued_time, parse_message
from osrdyne.protocol.telemetry import ENQUEUED_HEADER, KEY_HEADER

_TIME = pa.timestamp("us", tz="UTC")
EVENTS = pa.schema(
    [
        ("key", pa.string()),
        ("series", pa.string()),
        ("ts", _TIME),
        ("kind", pa.string()),
        ("value", pa.float64()),
        ("value_text", pa.string()),
        ("quality", pa.string()),
        ("enqueued", _TIME),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("index", pa.int32()),
        ("message_id", pa.string()),
        ("attributes", pa.map_(pa.string(), pa.string())),
        ("copy_of", pa.int64()),
    ]
)
"""The columns of a table."""

INVALID = pa.schema(
    [
        ("key", pa.string()),
        ("reason", pa.string()),
        ("enqueued", _TIME),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("index", pa.int32()),
        ("message_id", pa.string()),
        ("size_bytes", pa.int64()),
        ("body", pa.binary()),
        ("copy_of", pa.int64()),
    ]
)
"""The columns of `_invalid/`. `index` is -1 if the whole message is invalid."""

KEPT_BYTES = 64 * 1024
"""How much of an invalid event is kept. The log has all of it."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """The rows of a batch of messages: with the schema `EVENTS`, and with `INVALID`."""

    events: pa.RecordBatch
    invalid: pa.RecordBatch


OLD_AFTER = 365 * 86_400 * 1_000_000
"""Microseconds: an event that is older when it arrives probably has a wrong time."""


def parse(messages: pa.RecordBatch, *, partition: int, mapping: EventMapping = AS_THEY_ARE) -> Parsed:
    """Parse messages of one partition, in the columns of `rabbitmq-stream`. Whatever they hold, nothing is raised."""
    keys, times = _keys_and_times(messages)
    events: list[Event] = []
    invalid: list[InvalidEvent] = []
    messages_of_events: list[int] = []  # by their number in `messages`
    messages_of_invalid: list[int] = []
    columns = zip(
        times, messages.column("content_encoding").to_pylist(), messages.column("body").to_pylist(), strict=True
    )
    with collector_paused():
        for number, (enqueued, encoding, body) in enumerate(columns):
            parsed = parse_message(body, encoding=encoding, enqueued=enqueued, mapping=mapping)
            events += parsed.events
            messages_of_events += [number] * len(parsed.events)
            if parsed.invalid:
                invalid += parsed.invalid
                messages_of_invalid += [number] * len(parsed.invalid)
        index, series, ts, kind, value, text, quality, attributes = zip(*events, strict=True) if events else [()] * 8
    of_message = {
        "key": keys,
        "enqueued": pa.array(times, _TIME),
        "partition": pa.repeat(pa.scalar(partition, pa.int32()), len(messages)),
        "offset": messages.column("offset"),
        "message_id": messages.column("message_id"),
    }
    of_event: dict[str, Sequence[Any]] = {
        "series": series,
        "ts": ts,
        "kind": kind,
        "value": value,
        "value_text": text,
        "quality": quality,
        "index": index,
        "attributes": attributes,
    }
    of_invalid: dict[str, Sequence[Any]] = {
        "reason": [one.reason for one in invalid],
        "index": [one.number for one in invalid],
        "size_bytes": [len(one.body) for one in invalid],
        "body": [one.body[:KEPT_BYTES] for one in invalid],
    }
    return Parsed(
        _batch(EVENTS, of_event, of_message, messages_of_events),
        _batch(INVALID, of_invalid, of_message, messages_of_invalid),
    )


def count_old(events: pa.RecordBatch) -> int:
    """How many events were more than a year old when they arrived."""
    arrived, happened = (events.column(name).cast(pa.int64()) for name in ("enqueued", "ts"))
    return pc.sum(pc.greater(pc.subtract(arrived, happened), OLD_AFTER)).as_py() or 0


def identify(messages: pa.RecordBatch) -> pa.RecordBatch:
    """What identifies each message: key, message_id, enqueued and offset, as in the rows of its events."""
    keys, times = _keys_and_times(messages)
    columns = [keys, messages.column("message_id"), pa.array(times, _TIME), messages.column("offset")]
    return pa.RecordBatch.from_arrays(columns, names=["key", "message_id", "enqueued", "offset"])


def _keys_and_times(messages: pa.RecordBatch) -> tuple[pa.Array, list[int | None]]:
    headers = messages.column("headers")
    keys = pc.coalesce(pc.map_lookup(headers, query_key=KEY_HEADER, occurrence="first"), messages.column("routing_key"))
    sent = pc.map_lookup(headers, query_key=ENQUEUED_HEADER, occurrence="first").to_pylist()
    return keys, list(map(enqueued_time, sent, messages.column("timestamp").cast(pa.int64()).to_pylist()))


def _batch(
    schema: pa.Schema,
    columns: Mapping[str, Sequence[Any]],
    of_message: Mapping[str, pa.Array],
    numbers: Sequence[int],
) -> pa.RecordBatch:
    """Rows of messages with these numbers, none of which is known to be a copy. `columns`: a value for each row;
    `of_message`: one for each message."""
    places = pa.array(numbers, pa.int32())
    arrays = []
    for field in schema:
        if field.name in columns:
            arrays.append(pa.array(columns[field.name], type=field.type))
        elif field.name in of_message:
            arrays.append(of_message[field.name].take(places))
        else:
            arrays.append(pa.nulls(len(places), field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
