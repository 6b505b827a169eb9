"""The deadlines of forwarded requests in each queue, in order: finds expired requests behind unexpired ones.

RabbitMQ removes expired requests at the head of a queue itself. Only if an unexpired request is in front of an expired
one has the whole queue to be read and written, which is expensive. The ingress records the deadlines that it forwards,
and the length of the queue shows how many of the latest ones still wait. Pure; no clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from osrdyne.protocol.deadlines import is_past
from osrdyne.protocol.names import QueueId

MAX_KNOWN = 20_000  # Maximum number of deadlines of one queue; earlier ones are dropped.
SPARE = 100  # Deadlines kept beyond twice the number of waiting requests, because a listing is some seconds old.


@dataclass(slots=True)
class _Passed:
    """The deadlines of one queue. A request without a deadline has an infinite one."""

    deadlines: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_KNOWN))
    latest: float = -math.inf
    first_hidden: float = math.inf
    """The earliest deadline of a request behind one with a later deadline."""

    def add(self, deadline: float) -> None:
        self.deadlines.append(deadline)
        self._follow(deadline)

    def follow_only(self, deadlines: Iterable[float]) -> None:
        """Recompute `first_hidden` for these deadlines only."""
        self.latest, self.first_hidden = -math.inf, math.inf
        for deadline in deadlines:
            self._follow(deadline)

    def _follow(self, deadline: float) -> None:
        # It stands behind a later one: RabbitMQ expires it only when it reaches the head (broker: expiry-at-the-head).
        if deadline < self.latest:
            self.first_hidden = min(self.first_hidden, deadline)
        self.latest = max(self.latest, deadline)


class PassedDeadlines:
    """The deadlines of every queue of the pool, in one term. Those that an earlier leader forwarded are unknown."""

    def __init__(self, *, skew_ms: int) -> None:
        self._skew_ms = skew_ms
        self._passed: dict[QueueId, _Passed] = {}

    def note(self, queue: QueueId, deadline_ms: int | None) -> None:
        """Record a request that was forwarded to the queue."""
        self._passed.setdefault(queue, _Passed()).add(_finite_or_not(deadline_ms))

    def replace(self, queue: QueueId, deadlines_ms: Iterable[int | None]) -> None:
        """Replace the deadlines of a queue by those that were read from it."""
        passed = self._passed[queue] = _Passed()
        for deadline_ms in deadlines_ms:
            passed.add(_finite_or_not(deadline_ms))

    def queues(self) -> frozenset[QueueId]:
        """The queues with known deadlines."""
        return frozenset(self._passed)

    def forget(self, queues: Iterable[QueueId]) -> None:
        """Forget the queues of groups that have ended."""
        for queue in queues:
            self._passed.pop(queue, None)

    def due(self, *, now_ms: int) -> list[QueueId]:
        """Queues in which a request has expired behind one with a later deadline, unless a worker took them. The
        queue with the earliest such deadline comes first."""
        hidden = {queue: passed.first_hidden for queue, passed in self._passed.items()}
        return sorted((queue for queue in hidden if self._is_past(hidden[queue], now_ms)), key=lambda one: hidden[one])

    def settle(self, queue: QueueId, waiting: int, *, now_ms: int) -> None:
        """Record that the queue holds `waiting` requests and none has expired behind another: it is due when the
        next one does."""
        passed = self._passed.get(queue)
        if passed is not None:
            ones = _last(passed.deadlines, waiting)
            passed.follow_only(one for one in ones if not self._is_past(one, now_ms))

    def may_hide_expired(self, queue: QueueId, waiting: int, *, now_ms: int) -> bool:
        """Whether one of `waiting` requests may have expired behind an unexpired one; True if that is unknown."""
        passed = self._passed.get(queue, _Passed()).deadlines
        if waiting < 2:
            hides = False
        # Some of them came past this leader: their deadlines are unknown, and one of them may have passed.
        elif waiting > len(passed):
            hides = True
        else:
            past = [self._is_past(one, now_ms) for one in _last(passed, waiting)]
            # Expired ones at the head are no reason: RabbitMQ removes those itself.
            hides = False in past and True in past[past.index(False) :]
        while len(passed) > 2 * waiting + SPARE:
            passed.popleft()
        return hides

    def _is_past(self, deadline: float, now_ms: int) -> bool:
        return deadline < math.inf and is_past(int(deadline), now_ms=now_ms, skew_ms=self._skew_ms)


def _finite_or_not(deadline_ms: int | None) -> float:
    return math.inf if deadline_ms is None else deadline_ms


def _last(deadlines: deque[float], number: int) -> Iterable[float]:
    return islice(deadlines, max(0, len(deadlines) - number), None)
