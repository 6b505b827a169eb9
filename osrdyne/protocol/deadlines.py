"""The deadline of a request. Source: docs/reference/protocol/requests.md, headers `expiration` and `x-deadline`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

DEADLINE_HEADER = "x-deadline"
_MAX_MS = 253_402_300_799_000  # The end of the year 9999; later values are not deadlines.
MAX_EXPIRATION_MS = 2**32 - 1
"""About 50 days: RabbitMQ closes the channel that publishes a longer `expiration`."""


def parse_expiration_ms(expiration: object) -> int | None:
    """The `expiration` property in milliseconds; None if it is absent or not a whole number ≥ 0."""
    if isinstance(expiration, str) and expiration.isascii() and expiration.isdigit():
        return int(expiration)
    if isinstance(expiration, int) and not isinstance(expiration, bool) and expiration >= 0:
        return expiration
    return None


def deadline_ms(
    *,
    headers: Mapping[str, object],
    expiration: object,
    timestamp: datetime | None,
    first_seen_ms: int,
    forwarded: bool = False,
    skew_ms: int = 0,
) -> int | None:
    """The deadline by the clock of the receiver, in milliseconds since the epoch, or None.

    The earlier of `x-deadline` and `timestamp` + `expiration`, plus `skew_ms`: the clock that set them may be behind by
    so much. But not later than `first_seen_ms` + `expiration`, which depends on no other clock, and which alone counts
    if there is nothing else. `forwarded`: `timestamp` is that of the caller, and `expiration` counts from the forward.
    Invalid values (not a number, negative, after the year 9999) count as absent.
    """
    candidates = []
    absolute = headers.get(DEADLINE_HEADER)
    if isinstance(absolute, int | float) and not isinstance(absolute, bool) and 0 <= absolute <= _MAX_MS:
        candidates.append(int(absolute) + skew_ms)
    lifetime = parse_expiration_ms(expiration)
    if lifetime is not None:
        is_dated = timestamp is not None and not forwarded
        # With `x-deadline` but no timestamp, a client limits the time in the queue only.
        if is_dated or forwarded or not candidates:
            candidates.append(first_seen_ms + lifetime)
        if timestamp is not None and is_dated:
            candidates.append(int(timestamp.timestamp() * 1000) + lifetime + skew_ms)
    deadline = min(candidates, default=None)
    return None if deadline is None or deadline > _MAX_MS else deadline


def is_past(deadline: int | None, *, now_ms: int) -> bool:
    """Whether the deadline has passed."""
    return deadline is not None and now_ms > deadline


def remaining_expiration(deadline: int | None, *, now_ms: int) -> str | None:
    """The `expiration` property for the remaining time to the deadline; `"0"` if it has passed.

    The time is limited to `MAX_EXPIRATION_MS`; the next hop computes it again.
    """
    return None if deadline is None else str(min(max(0, deadline - now_ms), MAX_EXPIRATION_MS))
