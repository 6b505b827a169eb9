"""The queue layout: which queues a group has, and to which exchanges they are bound. One queue in a direct pool, one
for each priority level in a managed pool. Source: docs/reference/protocol/names.md;
docs/reference/routes/priorities.md.

The queue of a level that no route uses any more, for example after its pool has become a direct one, stays until it is
proven empty: workers serve it, and no request is routed to it. There is one layout for each term.
`pool.routing.priorities` selects the used levels (`use`) and retires unused ones (`stop_serving`);
`RequestQueueCommands` records which queues exist.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from osrdyne.broker.topology.declarations import Exchange, Topology
from osrdyne.protocol.names import PRIORITIES, Key, PoolNames, QueueName


@dataclass(frozen=True, slots=True)
class GroupQueue:
    """One queue of a group, and the exchange that routes requests to it; `priority` None is the default level.

    `used`: requests may be routed to it. Otherwise it stays only until it is empty.
    """

    name: QueueName
    exchange: str
    priority: int | None = None
    used: bool = True


class QueueLayout:
    """The queues of every group of one pool."""

    def __init__(self, names: PoolNames, *, managed: bool = False, priorities: Iterable[int] = ()) -> None:
        self.names = names
        self.managed = managed
        self._used = frozenset(priorities)
        self._levels: defaultdict[Key, set[int]] = defaultdict(set)
        self._bases: set[Key] = set()
        self._not_served: set[tuple[Key, int]] = set()

    @property
    def used(self) -> frozenset[int]:
        """The priorities for which every group has a queue."""
        return self._used

    @property
    def exchanges(self) -> Topology:
        """The exchanges of the used levels."""
        return self.exchanges_for(self._used)

    def exchanges_for(self, priorities: Iterable[int]) -> Topology:
        """The exchanges of these levels and the default level. A request that they cannot route becomes an orphan."""
        if not self.managed:
            return Topology(())
        arguments = {"alternate-exchange": self.names.orphan_exchange}
        levels = [None, *sorted(priorities)]
        return Topology(tuple(Exchange(self.names.work_exchange(one), "direct", arguments) for one in levels))

    def use(self, priorities: Iterable[int]) -> None:
        """Use these levels in every group. Queues of other levels stay with the groups that have them."""
        self._used = frozenset(priorities)
        # Workers consume the queues of a level that is used again.
        self._not_served = {(key, priority) for key, priority in self._not_served if priority not in self._used}

    def queues(self, key: Key, *, listed: Iterable[int | None] = ()) -> tuple[GroupQueue, ...]:
        """The queues of a group, the most urgent first and the default level last. `listed`: levels whose queues exist
        according to a listing."""
        levels = sorted(self._used.union(self._levels.get(key, ()), (one for one in listed if one is not None)))
        exchange = self.names.work_exchange(None) if self.managed else self.names.requests_exchange
        return (
            *(
                GroupQueue(self.names.request_queue(key, one), self.names.work_exchange(one), one, one in self._used)
                for one in levels
            ),
            GroupQueue(self.names.request_queue(key), exchange),
        )

    def served(self, key: Key) -> list[QueueName]:
        """The queues that the workers of a group consume, the most urgent first."""
        return [queue.name for queue in self.queues(key) if (key, queue.priority) not in self._not_served]

    def has_levels(self, key: Key) -> bool:
        """Whether the group has more than the queue of a direct pool."""
        return bool(self._used or self._levels.get(key))

    def unused(self) -> list[tuple[Key, int]]:
        """The queues of levels that no route uses any more, by key and priority."""
        return [(key, one) for key, levels in self._levels.items() for one in sorted(levels - self._used)]

    def stop_serving(self, key: Key, priority: int) -> None:
        """Have workers stop consuming the empty queue of an unused level."""
        self._not_served.add((key, priority))

    def serve_again(self, key: Key, priority: int) -> bool:
        """Have workers consume the queue again, because it was not empty. Returns False if they never stopped."""
        was_stopped = (key, priority) in self._not_served
        self._not_served.discard((key, priority))
        return was_stopped

    def possible(self, key: Key) -> tuple[QueueName, ...]:
        """Every queue that the group may ever have."""
        # For the permissions of a worker, which are set once at its start and must cover levels that come later.
        priorities = PRIORITIES if self.managed else sorted(self._levels.get(key, ()))
        return tuple(self.names.request_queue(key, priority) for priority in (*priorities, None))

    def note(self, key: Key, priority: int | None) -> None:
        """Record that this queue of the group exists."""
        if priority is None:
            self._bases.add(key)
        else:
            self._levels[key].add(priority)

    def is_new(self, key: Key, priority: int | None) -> bool:
        """Whether this queue of the group is not known to exist. A group may have queues of levels and no base queue:
        the base queue is declared last, and a leader may be killed before."""
        return key not in self._bases if priority is None else priority not in self._levels.get(key, set())

    def existing(self, key: Key) -> list[GroupQueue]:
        """The queues of a group that are known to exist, the most urgent first. A level that has just come into use may
        have no queue yet."""
        return [queue for queue in self.queues(key) if not self.is_new(key, queue.priority)]

    def note_missing(self, key: Key, priority: int | None) -> None:
        """Record that a queue of a group in use is missing, so that it is declared before the next bind."""
        if priority is None:
            self._bases.discard(key)
        elif priority in self._levels.get(key, set()):
            self.forget(key, priority)

    def forget(self, key: Key, priority: int | None) -> None:
        """Record that the queue was deleted; the base queue is deleted last."""
        if priority is None:
            self._bases.discard(key)
            self._levels.pop(key, None)
            return
        self._not_served.discard((key, priority))
        self._levels[key].discard(priority)
        if not self._levels[key]:
            del self._levels[key]
