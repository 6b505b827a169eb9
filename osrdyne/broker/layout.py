"""Which queues a group has and what they are bound to: one in a direct pool, one for each priority class in a managed
pool. Source: PROTOCOL, "Names"; INGRESS, "Stores".

A group keeps a store that its manifest does not use any more until the group ends, so that what is in it is served. One
layout a term: the term says which priorities are used, listings and commands note which stores there are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from osrdyne.broker.topology import Exchange, Topology
from osrdyne.protocol.names import PRIORITIES, Key, PoolNames, QueueName


@dataclass(frozen=True, slots=True)
class GroupQueue:
    """One queue of a group, and the exchange from which it gets its requests; `priority` None is the default class."""

    name: QueueName
    exchange: str
    priority: int | None = None


class QueueLayout:
    """The queues of every group of one pool."""

    def __init__(self, names: PoolNames, *, managed: bool = False, priorities: Iterable[int] = ()) -> None:
        self.names = names
        self.managed = managed
        self._used = frozenset(priorities)
        self._stores: defaultdict[Key, set[int]] = defaultdict(set)

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

    def queues(self, key: Key) -> tuple[GroupQueue, ...]:
        """The queues of a group, the most urgent first and the default class last."""
        if not self.managed:
            return (GroupQueue(self.names.request_queue(key), self.names.requests_exchange),)
        stores = sorted(self._used | self._stores.get(key, set()))
        return tuple(
            GroupQueue(self.names.request_queue(key, one), self.names.work_exchange(one), one)
            for one in [*stores, None]
        )

    def possible(self, key: Key) -> tuple[QueueName, ...]:
        """Every queue that the group could ever have: a worker outlives a change of the routes."""
        priorities = [*PRIORITIES, None] if self.managed else [None]
        return tuple(self.names.request_queue(key, priority) for priority in priorities)

    def note(self, key: Key, priority: int | None) -> None:
        """There is such a queue."""
        if priority is not None:
            self._stores[key].add(priority)

    def is_new(self, key: Key, priority: int | None) -> bool:
        """Whether nobody has seen this store of the group yet. That the group has its base queue is known elsewhere."""
        return priority is not None and priority not in self._stores.get(key, set())

    def forget(self, key: Key, priority: int | None) -> None:
        """The queue is deleted; the base queue is the last to go."""
        if priority is None:
            self._stores.pop(key, None)
        else:
            self._stores[key].discard(priority)
