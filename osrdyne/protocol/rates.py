"""The rate at which a worker may serve events, in its environment and in control messages.

Source: docs/reference/protocol/reports.md, "Control messages".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RATE_FIELD = "rate"
"""The rate of a worker in a control message, and in its reports about its state: an object, or null for no limit."""
LARGEST_EVENT = 32 * 1024
"""Bytes. A rate counts a larger event as one of this size; the ingest of telemetry stores it as invalid."""
LONGEST_REQUEST = 60.0
"""Seconds. Workers refuse a request whose events would need longer at their rate."""
_LARGEST = 10**12


@dataclass(frozen=True, slots=True)
class EventRate:
    """Events a minute. A larger event than `event_bytes` counts as several: one for each block of this size."""

    events_per_minute: float
    event_bytes: int

    def to_wire(self) -> dict[str, float]:
        return {"events_per_minute": self.events_per_minute, "event_bytes": self.event_bytes}


def rate_from_wire(value: object) -> EventRate | None:
    """Parse a rate; None for no limit. Raises ValueError."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError("a rate is an object or null")
    events, size = value.get("events_per_minute"), value.get("event_bytes")
    if isinstance(events, bool) or not isinstance(events, int | float) or not 0 < events <= _LARGEST:
        raise ValueError(f"events_per_minute must be a number above 0 and at most {_LARGEST:,}")
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= _LARGEST:
        raise ValueError(f"event_bytes must be a whole number above 0 and at most {_LARGEST:,}")
    return EventRate(float(events), size)


def blocks(size_bytes: int, block_bytes: int) -> int:
    """How many blocks a message or an event of this size counts as; an empty one is one block."""
    return max(1, -(-size_bytes // block_bytes))
