"""Waiting requests of each priority level, and the age of the oldest: for metrics, `status` and the order of starts.

RabbitMQ reports how many requests wait in a queue, in listings that are some seconds old, but not since when. The queue
of one level is first in, first out, so the oldest of n waiting requests is the n-th latest that was forwarded. The
ingress records what it forwards and a listing supplies n. Requests from before this term are at least as old as the
term. Pure; no clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from osrdyne.broker.management.listings import ListedQueue
from osrdyne.protocol.names import PRIORITIES, Key, QueueId

MARK_INTERVAL = 1.0  # Seconds between two marks of a queue, and so the resolution of an age.
DEFAULT_RANK = len(PRIORITIES)  # The default level comes after all priorities.
MAX_MARKS = 128  # Marks of one queue; beyond that every second one is dropped.


@dataclass(frozen=True, slots=True)
class Waiting:
    """Requests of one level that no worker has taken. `oldest_at`: monotonic time of the oldest."""

    requests: int
    oldest_at: float | None

    def age(self, now: float) -> float | None:
        """Seconds that the oldest request has waited; None if no request waits or its age is unknown."""
        return None if self.oldest_at is None else now - self.oldest_at

    def __add__(self, other: Waiting) -> Waiting:
        times = [at for at in (self.oldest_at, other.oldest_at) if at is not None]
        return Waiting(self.requests + other.requests, min(times, default=None))


NOTHING = Waiting(0, None)


class ArrivalLog:
    """Arrival times of requests in one queue, as marks (number of earlier arrivals, time)."""

    def __init__(self) -> None:
        self._count = 0
        self._marks: list[tuple[int, float]] = []

    def note(self, at: float) -> None:
        """Record one arrival."""
        if not self._marks or at - self._marks[-1][1] >= MARK_INTERVAL:
            self._marks.append((self._count, at))
            if len(self._marks) > MAX_MARKS:
                self._marks = self._marks[::2]
        self._count += 1

    def oldest_at(self, waiting: int) -> float | None:
        """Return the earliest possible arrival time of the oldest of `waiting` requests; None if it arrived before
        the first record. Drops older marks."""
        gone = self._count - waiting
        if gone < 0:
            return None
        while len(self._marks) > 1 and self._marks[1][0] <= gone:
            del self._marks[0]
        return self._marks[0][1] if self._marks else None


class PriorityBacklog:
    """The backlog of every level in one term that began at `since` (monotonic). None: arrivals are not recorded, as
    in a direct pool, and ages are unknown."""

    def __init__(self, *, since: float | None) -> None:
        self._since = since
        self._listed: set[Key] = set()
        self._arrivals: defaultdict[QueueId, ArrivalLog] = defaultdict(ArrivalLog)
        self._of_groups: dict[Key, dict[int | None, Waiting]] = {}
        self._unlisted: dict[Key, dict[int, float]] = {}  # Levels with requests that no listing contains yet.

    def note(self, key: Key, priority: int | None, at: float) -> None:
        """Record a request that was forwarded to the group."""
        self._arrivals[key, priority].note(at)
        if priority is not None:
            self._unlisted.setdefault(key, {})[priority] = at

    def take_listing(self, listed: Sequence[ListedQueue]) -> None:
        """Take the number of waiting requests from a listing."""
        self._of_groups = {
            queue.key: {
                priority: self._waiting_in((queue.key, priority), ready)
                for priority, ready in queue.ready_by_level.items()
            }
            for queue in listed
        }
        for queue in listed:
            noted = self._unlisted.pop(queue.key, {})
            # A listing may be older than a request: what came after the sample is not in its figures.
            if later := {priority: at for priority, at in noted.items() if at >= queue.sampled_after}:
                self._unlisted[queue.key] = later
        self._forget({queue.key for queue in listed})

    def _waiting_in(self, queue: QueueId, ready: int) -> Waiting:
        log = self._arrivals.get(queue)
        at = None if log is None else log.oldest_at(ready)  # also called for an empty queue, because it drops old marks
        return Waiting(ready, (self._since if at is None else at) if ready else None)

    def _forget(self, listed: set[Key]) -> None:
        """Drop the arrivals of groups that were listed before and are not listed any more."""
        over = self._listed - listed
        self._listed = listed
        for queue in [queue for queue in self._arrivals if queue[0] in over]:
            del self._arrivals[queue]
        for key in over & self._unlisted.keys():
            del self._unlisted[key]

    def rank(self, key: Key) -> int:
        """The highest priority of which a request of the group may wait: 0 is the highest, `DEFAULT_RANK` the default
        level."""
        listed = (priority for priority, one in self.of_group(key).items() if one.requests and priority is not None)
        return min([*listed, *self._unlisted.get(key, ())], default=DEFAULT_RANK)

    def of_group(self, key: Key) -> Mapping[int | None, Waiting]:
        """The backlog of a group by priority level, None for the default level, as of the latest listing."""
        return self._of_groups.get(key, {})

    def waiting(self) -> dict[int | None, Waiting]:
        """The backlog by priority level over all groups."""
        found: dict[int | None, Waiting] = {}
        for group in self._of_groups.values():
            for priority, one in group.items():
                found[priority] = found.get(priority, NOTHING) + one
        return found
