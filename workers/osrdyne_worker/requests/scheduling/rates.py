"""The rate of a worker: the number of events a minute that it serves, and the number of events in a request.

The leader sets the rate (quotas: `rates`). Requests beyond it wait in order, in the worker and in their queue.
"""

from __future__ import annotations

import asyncio
import json

from osrdyne.aio.clock import Clock
from osrdyne.aio.signals import Wakeup
from osrdyne.protocol.messages import Request
from osrdyne.protocol.rates import LARGEST_EVENT, LONGEST_REQUEST, EventRate, blocks
from osrdyne_worker.app.errors import RequestError

BURST = 1.0
"""Seconds. After an idle time, a worker may serve the events of this time at once."""
MAX_DEBT = LONGEST_REQUEST
"""Seconds. A request whose events need longer is refused: all requests behind it would have to wait."""
_LARGE_BODY = 64 * 1024
"""Bytes. Larger bodies are counted in a thread."""
_EPSILON = 1e-9
"""Seconds, for rounding errors of sums of times."""


class EventBudget:
    """A token bucket of events. A request may begin as soon as the bucket is not overdrawn, and takes all its events at
    once: so a request of any size gets its turn, and over time exactly the rate is served. Used on the event loop
    only."""

    def __init__(self, clock: Clock, rate: EventRate | None = None) -> None:
        self._clock = clock
        self.rate = rate
        self._free_at = clock.monotonic()  # when the next request may begin
        self._counting = asyncio.Lock()
        self.changed = Wakeup(clock)

    def use(self, rate: EventRate | None) -> None:
        """Use another rate from now on. The wait for events that were already taken changes with the rate, but it does
        not grow beyond `MAX_DEBT`."""
        now = self._clock.monotonic()
        if rate is not None and self.rate is not None:
            debt = self._free_at - now
            scaled = debt * self.rate.events_per_minute / rate.events_per_minute
            self._free_at = now + min(scaled, max(debt, MAX_DEBT))
        else:
            self._free_at = now
        self.rate = rate
        self.changed.set()

    def wait(self) -> float:
        """Seconds until a request may begin; 0: now."""
        if self.rate is None:
            return 0.0
        wait = self._free_at - self._clock.monotonic()
        return wait if wait > _EPSILON else 0.0

    def take(self, events: int) -> None:
        """Take the events of a request that begins."""
        if self.rate is not None:
            earliest = self._clock.monotonic() - BURST
            # The rate may have become lower after the events were counted.
            seconds = min(60.0 * events / self.rate.events_per_minute, MAX_DEBT)
            self._free_at = max(self._free_at, earliest) + seconds

    async def count(self, request: Request) -> int:
        """Return the number of events in a request; 0 without a rate. Raises `RequestError` if there are too many."""
        if (rate := self.rate) is None:
            return 0
        # One at a time, in the order of arrival: a small request must not overtake a large one that is being counted.
        async with self._counting:
            body, size = request.body, rate.event_bytes
            is_large = len(body) > _LARGE_BODY
            events = await asyncio.to_thread(count_events, body, size) if is_large else count_events(body, size)
        if events * 60.0 > MAX_DEBT * rate.events_per_minute:
            raise RequestError(
                f"The request has {events} events; the worker serves {rate.events_per_minute:g} a minute, and a "
                f"request may have those of {MAX_DEBT:g} seconds at most. Send fewer events in one request.",
                413,
                "too_many_events",
                {"events": events},
            )
        return events


def count_events(body: bytes, event_bytes: int, *, arrays: bool = False) -> int:
    """Count the events of a body in blocks. The elements of its list `events` are events; a body without one is itself
    one event. With `arrays`, as in telemetry, the elements of a body that is a list are events as well."""
    events = _events(body, arrays=arrays)
    if not events:
        return blocks(min(len(body), LARGEST_EVENT), event_bytes)
    return sum(blocks(min(_size(event), LARGEST_EVENT), event_bytes) for event in events)


def _events(body: bytes, *, arrays: bool) -> list[object]:
    # Most bodies have no events and are not parsed. `\u`: the name may be escaped; zero byte: the body may be UTF-16.
    is_array = arrays and body.lstrip()[:1] == b"["
    if not is_array and not any(sign in body for sign in (b'"events"', b"\\u", b"\0")):
        return []
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return []
    if isinstance(document, list):
        return document if arrays else []
    events = document.get("events") if isinstance(document, dict) else None
    return events if isinstance(events, list) else []


def _size(event: object) -> int:
    return len(json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass"))
