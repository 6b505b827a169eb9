"""Cancels that arrived before their request: each counts once and for a short time, in bounded memory."""

from __future__ import annotations

import math
from collections import OrderedDict

from osrdyne.aio.clock import Clock

MAX_REMEMBERED = 1000
REMEMBERED_FOR = 60.0
"""Seconds. A cancel that is forgotten too early costs unnecessary work; one that is kept too long would cancel a later
request of the same name."""

Name = tuple[str, str]
"""Correlation id and reply-to of a request. Knowing both is the right to cancel it."""


class Cancellations:
    """Requests that were cancelled and have not arrived, and requests completed just now, whose cancels come too late.

    A cancel may contain how long its request can wait for another attempt. For that time it applies to a request with
    earlier attempts: a new request of the same name has none.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._cancelled: OrderedDict[Name, float] = OrderedDict()
        self._completed: OrderedDict[Name, float] = OrderedDict()
        self._cancelled_between: OrderedDict[Name, float] = OrderedDict()

    def remember(self, correlation_id: str | None, reply_to: str | None, *, keep_for: float = 0.0) -> None:
        """Record the cancel of a request that is not in this worker, and may wait `keep_for` seconds for an attempt."""
        if not correlation_id or not reply_to:
            return
        name, now = (correlation_id, reply_to), self._clock.monotonic()
        # A cancel that crossed the answer on its way is dropped: the next request of this name was never cancelled.
        if not self._is_recent(self._completed.get(name)):
            self._put(self._cancelled, name, now)
            if keep_for > 0:
                # Kept for longer, and used only for a request with earlier attempts: it comes back after a wait of
                # known length.
                self._put(self._cancelled_between, name, now + keep_for)

    def completed(self, correlation_id: str | None, reply_to: str | None) -> None:
        """Record that a request was answered: a cancel that is still on its way is for this request."""
        if correlation_id and reply_to:
            self._put(self._completed, (correlation_id, reply_to), self._clock.monotonic())

    def take(self, correlation_id: str | None, reply_to: str | None, *, tried_before: bool = False) -> bool:
        """Whether the request that arrives now was cancelled; this uses the cancel up."""
        if not correlation_id or not reply_to:
            return False
        name = (correlation_id, reply_to)
        # Popped: a client may use a correlation id again, and the new request must run.
        was_cancelled = self._is_recent(self._cancelled.pop(name, None))
        until = self._cancelled_between.pop(name, -math.inf)  # also used up by a new request of an old name
        return was_cancelled or (tried_before and self._clock.monotonic() <= until)

    def _put(self, times: OrderedDict[Name, float], name: Name, moment: float) -> None:
        times[name] = moment
        # Kept in the order of time, so that the entry that is dropped is the oldest.
        times.move_to_end(name)
        if len(times) > MAX_REMEMBERED:
            times.popitem(last=False)

    def _is_recent(self, since: float | None) -> bool:
        return since is not None and self._clock.monotonic() - since < REMEMBERED_FOR
