"""Cancels that arrive before their request: each applies once and for a short time, in bounded memory."""

from __future__ import annotations

import math
from collections import OrderedDict

from osrdyne.aio.clock import Clock

MAX_REMEMBERED = 1000
REMEMBERED_FOR = 60.0
"""Seconds. If it is too short, the worker runs a cancelled request; if it is too long, a cancel may hit a later request
of the same name."""

Name = tuple[str, str]
"""Correlation id and reply-to of a request. A client that knows both may cancel it."""


class Cancellations:
    """Requests that were cancelled before they arrived, and completed requests, whose cancels come too late.

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
        # A cancel that has crossed the answer is dropped: it is not meant for the next request of this name.
        if not self._is_recent(self._completed.get(name)):
            self._put(self._cancelled, name, now)
            if keep_for > 0:
                # Kept for longer, but only for a request with earlier attempts: the length of its wait is known.
                self._put(self._cancelled_between, name, now + keep_for)

    def completed(self, correlation_id: str | None, reply_to: str | None) -> None:
        """Record that a request was answered: a cancel that arrives soon afterwards is for this request."""
        if correlation_id and reply_to:
            self._put(self._completed, (correlation_id, reply_to), self._clock.monotonic())

    def take(self, correlation_id: str | None, reply_to: str | None, *, tried_before: bool = False) -> bool:
        """Remove the cancel of a request that arrives; return whether there was one."""
        if not correlation_id or not reply_to:
            return False
        name = (correlation_id, reply_to)
        # Removed: a client may use a correlation id again, and the new request must run.
        was_cancelled = self._is_recent(self._cancelled.pop(name, None))
        until = self._cancelled_between.pop(name, -math.inf)  # removed by a new request of the same name, too
        return was_cancelled or (tried_before and self._clock.monotonic() <= until)

    def _put(self, times: OrderedDict[Name, float], name: Name, moment: float) -> None:
        times[name] = moment
        # In the order of time, so that the oldest entry is dropped.
        times.move_to_end(name)
        if len(times) > MAX_REMEMBERED:
            times.popitem(last=False)

    def _is_recent(self, since: float | None) -> bool:
        return since is not None and self._clock.monotonic() - since < REMEMBERED_FOR
