"""The last value of a series: the order of events, and the changes by messages. Pure.

An event is newer if its (ts, partition, offset, number in the message) is greater. So the same events in any order,
repeated or not, have the same result. Source: docs/reference/telemetry/last-values.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from osrdyne.amqp.stream_frames import StreamMessage
from osrdyne.protocol.event_mapping import EVENTS, EventMapping
from osrdyne.protocol.events import Event, enqueued_time, parse_message
from osrdyne.protocol.telemetry import ENQUEUED_HEADER, KEY_HEADER

READER = "last-value"
"""The name under which the reader stores its position."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class LastValue(NamedTuple):
    """The newest event of a series. Times are microseconds since the epoch. `sent_ts`: the time that the device sent,
    if `ts` was set to `enqueued` because it was too far in the future. `attributes`: a JSON object."""

    key: str
    series: str
    ts: int
    sent_ts: int | None
    kind: str
    value: float | None
    value_text: str | None
    quality: str | None
    attributes: str | None
    enqueued: int
    log_partition: int
    log_offset: int
    log_index: int
    message_id: str | None

    @property
    def order(self) -> tuple[int, int, int, int]:
        return self.ts, self.log_partition, self.log_offset, self.log_index


@dataclass(frozen=True, slots=True)
class Counts:
    """The outcomes of events. `events`: valid events that were read. `written`: changes of last values. `late`: events
    that were not newer than the value of their series, including repeated ones. `future`: events with a time too far
    in the future. `invalid`: invalid events and messages. `lost`: offsets that the retention removed before they were
    read."""

    events: int = 0
    written: int = 0
    late: int = 0
    future: int = 0
    invalid: int = 0
    lost: int = 0


@dataclass(slots=True)
class Changes:
    """The changes by messages of one partition. `next_offset`: the position of the reader after them."""

    partition: int
    next_offset: int
    values: list[LastValue]
    counts: Counts = field(default_factory=Counts)


def fold(
    messages: Iterable[StreamMessage],
    *,
    partition: int,
    next_offset: int,
    max_future: float,
    lost: int = 0,
    mapping: EventMapping = EVENTS,
) -> Changes:
    """The newest events of messages by key and series. `max_future`: seconds. `mapping`: how messages become events.
    Raises nothing, whatever the messages contain."""
    newest: dict[tuple[str, str], LastValue] = {}
    events = late = future = invalid = 0
    limit = round(max_future * 1_000_000)
    for message in messages:
        enqueued = _enqueued(message)
        parsed = parse_message(message.body, encoding=message.content_encoding, enqueued=enqueued, mapping=mapping)
        invalid += len(parsed.invalid)
        if not parsed.events or enqueued is None:
            continue
        events += len(parsed.events)
        key, message_id = _key(message), message.message_id and _text(message.message_id)
        for event in parsed.events:
            value = _value(event, key, enqueued, partition, message.offset, message_id, latest=enqueued + limit)
            future += value.sent_ts is not None
            known = newest.get((key, value.series))
            if known is None or value.order > known.order:
                newest[key, value.series] = value
            else:
                late += 1
    return Changes(partition, next_offset, list(newest.values()), Counts(events, 0, late, future, invalid, lost))


def with_written(counts: Counts, *, given: int, written: int) -> Counts:
    """The counts after the database has taken `written` of the `given` values."""
    return replace(counts, written=written, late=counts.late + given - written)


def pieces(messages: Sequence[StreamMessage], *, most_bytes: int) -> Iterable[Sequence[StreamMessage]]:
    """Divide messages into parts whose bodies have at most `most_bytes`, or that are one message."""
    start = size = 0
    for number, message in enumerate(messages):
        if number > start and size + len(message.body) > most_bytes:
            yield messages[start:number]
            start, size = number, 0
        size += len(message.body)
    if start < len(messages):
        yield messages[start:]


def _value(
    event: Event, key: str, enqueued: int, partition: int, offset: int, message_id: str | None, *, latest: int
) -> LastValue:
    is_future = event.ts > latest
    return LastValue(
        key,
        event.series,
        enqueued if is_future else event.ts,
        event.ts if is_future else None,
        event.kind,
        event.value,
        event.value_text,
        event.quality,
        _encode(dict(event.attributes)) if event.attributes else None,
        enqueued,
        partition,
        offset,
        event.number,
        message_id,
    )


def _key(message: StreamMessage) -> str:
    key = message.headers.get(KEY_HEADER)
    if isinstance(key, bytes):
        return key.decode("utf-8", "replace")
    return _text(key if isinstance(key, str) else message.routing_key)


def _enqueued(message: StreamMessage) -> int | None:
    sent, stamped = message.headers.get(ENQUEUED_HEADER), message.timestamp
    known = sent if isinstance(sent, str) or type(sent) is int else None
    return enqueued_time(known, None if stamped is None else (stamped - _EPOCH) // _MICROSECOND)


def _text(text: str) -> str:
    """Replace bytes that are not UTF-8, which a database would refuse."""
    return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
