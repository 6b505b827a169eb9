"""Cancels that came before their request did: each counts once and for a short while, in bounded memory."""

from __future__ import annotations

import math
from collections import OrderedDict

from osrdyne.aio.clock import Clock

MAX_REMEMBERED = 1000
REMEMBERED_FOR = 60.0
"""Seconds. A cancel forgotten too early costs the work it would have saved; one kept for too long would hit a later
request of the same name."""

Name = tuple[str, str]
"""Correlation id and reply-to of a request. Knowing both is the right to cancel it."""


class CancelMemory:
    """What was cancelled and has not come yet; and what was completed a moment ago, whose cancels come too late.

    A cancel may say for how long its request may wait for another attempt. For so long it is meant for a request that
    was tried before: no later one of the same name was.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._cancelled: OrderedDict[Name, float] = OrderedDict()
        self._completed: OrderedDict[Name, float] = OrderedDict()
        self._cancelled_between: OrderedDict[Name, float] = OrderedDict()

    def remember(self, correlation_id: str | None, reply_to: str | None, *, keep_for: float = 0.0) -> None:
        """A cancel of a request that is not here, and may wait for another attempt for `keep_for` seconds."""
        if not correlation_id or not reply_to:
            return
        name, now = (correlation_id, reply_to), self._clock.monotonic()
        if not self._is_recent(self._completed.get(name)):
            self._put(self._cancelled, name, now)
            if keep_for > 0:
                self._put(self._cancelled_between, name, now + keep_for)

    def completed(self, correlation_id: str | None, reply_to: str | None) -> None:
        """A request was answered; a cancel that is still on its way is meant for this one."""
        if correlation_id and reply_to:
            self._put(self._completed, (correlation_id, reply_to), self._clock.monotonic())

    def take(self, correlation_id: str | None, reply_to: str | None, *, tried_before: bool = False) -> bool:
        """Whether the request that comes now was cancelled; the cancel is used up then."""
        if not correlation_id or not reply_to:
            return False
        name = (correlation_id, reply_to)
        was_cancelled = self._is_recent(self._cancelled.pop(name, None))
        until = self._cancelled_between.pop(name, -math.inf)  # used up, too, by a new request of an old name
        return was_cancelled or (tried_before and self._clock.monotonic() <= until)

    def _put(self, times: OrderedDict[Name, float], name: Name, moment: float) -> None:
        times[name] = moment
        times.move_to_end(name)
        if len(times) > MAX_REMEMBERED:
            times.popitem(last=False)

    def _is_recent(self, since: float | None) -> bool:
        return since is not None and self._clock.monotonic() - since < REMEMBERED_FOR
