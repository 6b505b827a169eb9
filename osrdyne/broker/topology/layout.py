"""Which queues a group has and what they are bound to: one in a direct pool, one for each priority class in a managed
pool. Source: docs/reference/protocol/names.md; docs/reference/routes/priorities.md.

A group keeps a store that no route uses any more, as when its pool becomes a direct one, until that is proven empty:
workers serve it, and nothing comes into it. One layout a term: the term says which priorities are used, listings and
commands note which stores there are, and `pool.unused_levels` which of them no route uses any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from osrdyne.broker.topology.declarations import Exchange, Topology
from osrdyne.protocol.names import PRIORITIES, Key, PoolNames, QueueName


@dataclass(frozen=True, slots=True)
class GroupQueue:
    """One queue of a group, and the exchange from which it gets its requests; `priority` None is the default class.

    `used`: requests may come into it; else it is only there until it is empty.
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
        self._stores: defaultdict[Key, set[int]] = defaultdict(set)
        self._bases: set[Key] = set()
        self._let_go: set[tuple[Key, int]] = set()

    @property
    def used(self) -> frozenset[int]:
        """The priorities that every group has a store for."""
        return self._used

    @property
    def exchanges(self) -> Topology:
        """The exchanges of the classes in use."""
        return self.exchanges_for(self._used)

    def exchanges_for(self, priorities: Iterable[int]) -> Topology:
        """The exchanges of these classes and the default one. What they cannot route becomes an orphan again."""
        if not self.managed:
            return Topology(())
        arguments = {"alternate-exchange": self.names.orphan_exchange}
        classes = [None, *sorted(priorities)]
        return Topology(tuple(Exchange(self.names.work_exchange(one), "direct", arguments) for one in classes))

    def use(self, priorities: Iterable[int]) -> None:
        """From now on every group has a store for each of these; others stay with the groups that have them."""
        self._used = frozenset(priorities)
        self._let_go = {(key, priority) for key, priority in self._let_go if priority not in self._used}

    def queues(self, key: Key, *, listed: Iterable[int | None] = ()) -> tuple[GroupQueue, ...]:
        """The queues of a group, the most urgent first and the default level last. `listed`: levels whose queues exist
        according to a listing."""
        stores = sorted(self._used.union(self._stores.get(key, ()), (one for one in listed if one is not None)))
        exchange = self.names.work_exchange(None) if self.managed else self.names.requests_exchange
        return (
            *(
                GroupQueue(self.names.request_queue(key, one), self.names.work_exchange(one), one, one in self._used)
                for one in stores
            ),
            GroupQueue(self.names.request_queue(key), exchange),
        )

    def served(self, key: Key) -> list[QueueName]:
        """What the workers of a group take requests from, the most urgent first."""
        return [queue.name for queue in self.queues(key) if (key, queue.priority) not in self._let_go]

    def has_levels(self, key: Key) -> bool:
        """Whether the group has more than the queue of a direct pool."""
        return bool(self._used or self._stores.get(key))

    def unused(self) -> list[tuple[Key, int]]:
        """The stores that no route uses any more, by group and priority."""
        return [(key, one) for key, stores in self._stores.items() for one in sorted(stores - self._used)]

    def stop_serving(self, key: Key, priority: int) -> None:
        """An unused store is empty: workers need not serve it any more."""
        self._let_go.add((key, priority))

    def serve_again(self, key: Key, priority: int) -> bool:
        """The store was not empty after all. False: it was not released before."""
        was_let_go = (key, priority) in self._let_go
        self._let_go.discard((key, priority))
        return was_let_go

    def possible(self, key: Key) -> tuple[QueueName, ...]:
        """Every queue that the group could ever have: a worker outlives a change of the routes."""
        priorities = PRIORITIES if self.managed else sorted(self._stores.get(key, ()))
        return tuple(self.names.request_queue(key, priority) for priority in (*priorities, None))

    def note(self, key: Key, priority: int | None) -> None:
        """There is such a queue."""
        if priority is None:
            self._bases.add(key)
        else:
            self._stores[key].add(priority)

    def is_new(self, key: Key, priority: int | None) -> bool:
        """Whether this queue of the group has not been seen yet. A group may have stores and no base queue: that is the
        last to be declared, and a leader may be killed before."""
        return key not in self._bases if priority is None else priority not in self._stores.get(key, set())

    def note_missing(self, key: Key, priority: int | None) -> None:
        """A queue of a group that goes on does not exist any more: it has to be declared before it is bound."""
        if priority is None:
            self._bases.discard(key)
        elif priority in self._stores.get(key, set()):
            self.forget(key, priority)

    def forget(self, key: Key, priority: int | None) -> None:
        """The queue is deleted; the base queue is the last to go."""
        if priority is None:
            self._bases.discard(key)
            self._stores.pop(key, None)
            return
        self._let_go.discard((key, priority))
        self._stores[key].discard(priority)
        if not self._stores[key]:
            del self._stores[key]
