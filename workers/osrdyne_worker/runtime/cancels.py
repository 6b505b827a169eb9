"""Cancels that came before their request did: remembered for a while, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict

from osrdyne.aio.clock import Clock

MAX_REMEMBERED = 1000
REMEMBERED_FOR = 3600.0
"""Seconds; the default time-to-live of a request in a queue is 10 minutes."""


class CancelMemory:
    """Knowing both the correlation id and the reply-to of a request is the right to cancel it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._times: OrderedDict[tuple[str, str], float] = OrderedDict()

    def remember(self, correlation_id: str | None, reply_to: str | None) -> None:
        if not correlation_id or not reply_to:
            return
        self._times[correlation_id, reply_to] = self._clock.monotonic()
        self._times.move_to_end((correlation_id, reply_to))
        if len(self._times) > MAX_REMEMBERED:
            self._times.popitem(last=False)

    def was_cancelled(self, correlation_id: str | None, reply_to: str | None) -> bool:
        if not self._times or correlation_id is None or reply_to is None:
            return False
        since = self._times.get((correlation_id, reply_to))
        return since is not None and self._clock.monotonic() - since < REMEMBERED_FOR
