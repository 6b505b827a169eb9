"""Cancels that came before their request did: each counts once and for a short while, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict

from osrdyne.aio.clock import Clock

MAX_REMEMBERED = 1000
REMEMBERED_FOR = 60.0
"""Seconds. A cancel forgotten too early costs the work it would have saved; one kept for too long would hit a later
request of the same name."""

Name = tuple[str, str]
"""Correlation id and reply-to of a request. Knowing both is the right to cancel it."""


class CancelMemory:
    """What was cancelled and has not come yet; and what was completed a moment ago, whose cancels come too late."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._cancelled: OrderedDict[Name, float] = OrderedDict()
        self._completed: OrderedDict[Name, float] = OrderedDict()
        self._expected: OrderedDict[Name, float] = OrderedDict()

    def remember(self, correlation_id: str | None, reply_to: str | None) -> None:
        """A cancel of a request that is not here."""
        if not correlation_id or not reply_to:
            return
        name = (correlation_id, reply_to)
        if not self._is_recent(self._completed.get(name)):
            now = self._clock.monotonic()
            self._put(self._cancelled, name, max(now, self._expected.get(name, now)))

    def completed(self, correlation_id: str | None, reply_to: str | None) -> None:
        """A request was answered; a cancel that is still on its way is meant for this one."""
        if correlation_id and reply_to:
            self._put(self._completed, (correlation_id, reply_to), self._clock.monotonic())

    def expect(self, correlation_id: str | None, reply_to: str | None, *, seconds: float) -> None:
        """A request goes to wait and comes back after so long: a cancel until then is meant for it."""
        if correlation_id and reply_to:
            self._put(self._expected, (correlation_id, reply_to), self._clock.monotonic() + seconds)

    def take(self, correlation_id: str | None, reply_to: str | None) -> bool:
        """Whether the request that comes now was cancelled; the cancel is used up then."""
        if not self._cancelled or not correlation_id or not reply_to:
            return False
        return self._is_recent(self._cancelled.pop((correlation_id, reply_to), None))

    def _put(self, times: OrderedDict[Name, float], name: Name, moment: float) -> None:
        times[name] = moment
        times.move_to_end(name)
        if len(times) > MAX_REMEMBERED:
            times.popitem(last=False)

    def _is_recent(self, since: float | None) -> bool:
        return since is not None and self._clock.monotonic() - since < REMEMBERED_FOR
