"""Times as positions in the log: the messages that the ingress took at a time or later. Pure."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from osrdyne.amqp.stream_frames import StreamMessage
from osrdyne.protocol.telemetry import ENQUEUED_HEADER


def parse_time(text: str) -> datetime:
    """A time in ISO 8601, UTC without an offset. Raises ValueError."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither an offset nor a time in ISO 8601, as 2026-11-22T10:00:00Z.") from None
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)


def taken_from(when: datetime) -> Callable[[StreamMessage], bool]:
    """A test whether the ingress took a message at this time or later; for messages of other programs by timestamp."""
    limit = when.timestamp()

    def is_after(message: StreamMessage) -> bool:
        enqueued = message.headers.get(ENQUEUED_HEADER)
        if isinstance(enqueued, int):
            return enqueued / 1000 >= limit
        return message.timestamp is not None and message.timestamp.timestamp() >= limit

    return is_after
