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
class _QueueDeadlines:
    """The deadlines of one queue in the order in which they were forwarded, in milliseconds since the epoch. A request
    without one has an infinite deadline.

    `latest`: the latest of them. `first_hidden`: the earliest one that stands behind a later one.
    """

    deadlines: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_KNOWN))
    latest: float = -math.inf
    first_hidden: float = math.inf

    def add(self, deadline: float) -> None:
        self.deadlines.append(deadline)
        self._compare(deadline)

    def recompute(self, deadlines: Iterable[float]) -> None:
        """Compute `latest` and `first_hidden` for these deadlines only."""
        self.latest, self.first_hidden = -math.inf, math.inf
        for deadline in deadlines:
            self._compare(deadline)

    def _compare(self, deadline: float) -> None:
        # It stands behind a later one: RabbitMQ expires it only when it reaches the head (broker: expiry-at-the-head).
        if deadline < self.latest:
            self.first_hidden = min(self.first_hidden, deadline)
        self.latest = max(self.latest, deadline)


class ForwardedDeadlines:
    """The deadlines of every queue of the pool, in one term. Those that an earlier leader forwarded are unknown."""

    def __init__(self) -> None:
        self._queues: dict[QueueId, _QueueDeadlines] = {}

    def note(self, queue: QueueId, deadline_ms: int | None) -> None:
        """Record a request that was forwarded to the queue."""
        self._queues.setdefault(queue, _QueueDeadlines()).add(_or_infinite(deadline_ms))

    def replace(self, queue: QueueId, deadlines_ms: Iterable[int | None]) -> None:
        """Replace the deadlines of a queue by those that were read from it."""
        known = self._queues[queue] = _QueueDeadlines()
        for deadline_ms in deadlines_ms:
            known.add(_or_infinite(deadline_ms))

    def queues(self) -> frozenset[QueueId]:
        """The queues with known deadlines."""
        return frozenset(self._queues)

    def forget(self, queues: Iterable[QueueId]) -> None:
        """Forget the queues of groups that have ended."""
        for queue in queues:
            self._queues.pop(queue, None)

    def due(self, *, now_ms: int) -> list[QueueId]:
        """Queues in which a request has expired behind one with a later deadline, unless a worker took them. The
        queue with the earliest such deadline comes first."""
        hidden = {queue: known.first_hidden for queue, known in self._queues.items()}
        return sorted((queue for queue in hidden if _is_past(hidden[queue], now_ms)), key=lambda one: hidden[one])

    def settle(self, queue: QueueId, waiting: int, *, now_ms: int) -> None:
        """Record that the queue holds `waiting` requests and none has expired behind another: it is due when the
        next one does."""
        known = self._queues.get(queue)
        if known is not None:
            latest = _last(known.deadlines, waiting)
            known.recompute(one for one in latest if not _is_past(one, now_ms))

    def may_hide_expired(self, queue: QueueId, waiting: int, *, now_ms: int) -> bool:
        """Whether one of `waiting` requests may have expired behind an unexpired one; True if that is unknown."""
        known = self._queues.get(queue, _QueueDeadlines()).deadlines
        if waiting < 2:
            hides = False
        # An earlier leader forwarded some of them: their deadlines are unknown, and one of them may be over.
        elif waiting > len(known):
            hides = True
        else:
            past = [_is_past(one, now_ms) for one in _last(known, waiting)]
            # Expired ones at the head are no reason: RabbitMQ removes those itself.
            hides = False in past and True in past[past.index(False) :]
        while len(known) > 2 * waiting + SPARE:
            known.popleft()
        return hides


def _is_past(deadline: float, now_ms: int) -> bool:
    return deadline < math.inf and is_past(int(deadline), now_ms=now_ms)


def _or_infinite(deadline_ms: int | None) -> float:
    return math.inf if deadline_ms is None else deadline_ms


def _last(deadlines: deque[float], number: int) -> Iterable[float]:
    return islice(deadlines, max(0, len(deadlines) - number), None)
