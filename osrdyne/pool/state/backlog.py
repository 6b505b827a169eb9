"""What waits in each priority class of the pool, and how old the oldest of it is: for metrics only.

RabbitMQ tells how many requests wait in a queue, in listings some seconds old, and not since when. Within a class a
queue is first in, first out: of n that wait, the oldest is the n-th of those that were passed on last. The ingress
notes what it passes on, a listing tells n. What came before this term is at least as old as the term. Pure; no clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from osrdyne.broker.management.listings import ListedQueue
from osrdyne.protocol.names import Key, QueueId

MARK_INTERVAL = 1.0
"""Seconds between two marks of a queue: no age is told more exactly."""
MAX_MARKS = 128
"""Marks of one queue; of more, every second one is dropped."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Requests of one class that no worker has taken. `oldest_at`: monotonic time of the oldest."""

    requests: int
    oldest_at: float | None

    def age(self, now: float) -> float | None:
        """Seconds that the oldest has waited; None where nothing waits or nobody knows."""
        return None if self.oldest_at is None else now - self.oldest_at

    def with_(self, other: Waiting) -> Waiting:
        """Both together."""
        times = [at for at in (self.oldest_at, other.oldest_at) if at is not None]
        return Waiting(self.requests + other.requests, min(times, default=None))


NOTHING = Waiting(0, None)


class ArrivalLog:
    """When requests came into one queue: marks of (how many had come before, when)."""

    def __init__(self) -> None:
        self._count = 0
        self._marks: list[tuple[int, float]] = []

    def note(self, at: float) -> None:
        """One more has come."""
        if not self._marks or at - self._marks[-1][1] >= MARK_INTERVAL:
            self._marks.append((self._count, at))
            if len(self._marks) > MAX_MARKS:
                self._marks = self._marks[::2]
        self._count += 1

    def oldest_at(self, waiting: int) -> float | None:
        """When the oldest of `waiting` requests came, at the earliest; None: before the first that is known. Forgets
        what came before."""
        gone = self._count - waiting
        if gone < 0:
            return None
        while len(self._marks) > 1 and self._marks[1][0] <= gone:
            del self._marks[0]
        return self._marks[0][1] if self._marks else None


class PriorityBacklog:
    """The backlog of every class in one term, which began at `since` (monotonic). None: nobody notes what comes, as in
    a direct pool, and no age is known."""

    def __init__(self, *, since: float | None) -> None:
        self._since = since
        self._listed: set[Key] = set()
        self._arrivals: defaultdict[QueueId, ArrivalLog] = defaultdict(ArrivalLog)
        self._of_groups: dict[Key, dict[int | None, Waiting]] = {}

    def note(self, key: Key, priority: int | None, at: float) -> None:
        """A request was passed on to the group."""
        self._arrivals[key, priority].note(at)

    def take_listing(self, listed: Sequence[ListedQueue]) -> None:
        """What waits by now."""
        self._of_groups = {
            queue.key: {
                priority: self._waiting_in((queue.key, priority), ready)
                for priority, ready in queue.ready_by_level.items()
            }
            for queue in listed
        }
        self._forget({queue.key for queue in listed})

    def _waiting_in(self, queue: QueueId, ready: int) -> Waiting:
        log = self._arrivals.get(queue)
        at = None if log is None else log.oldest_at(ready)  # also asked where nothing waits: it forgets what is over
        return Waiting(ready, (self._since if at is None else at) if ready else None)

    def _forget(self, listed: set[Key]) -> None:
        """Groups that were listed before and are not any more are over."""
        over = self._listed - listed
        self._listed = listed
        for queue in [queue for queue in self._arrivals if queue[0] in over]:
            del self._arrivals[queue]

    def of_group(self, key: Key) -> Mapping[int | None, Waiting]:
        """By priority, None is the default class; as of the latest listing."""
        return self._of_groups.get(key, {})

    def waiting(self) -> dict[int | None, Waiting]:
        """The same over all groups."""
        found: dict[int | None, Waiting] = {}
        for group in self._of_groups.values():
            for priority, one in group.items():
                found[priority] = found.get(priority, NOTHING).with_(one)
        return found
