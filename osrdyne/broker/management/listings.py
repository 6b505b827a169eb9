"""Listings of a pool's request queues through the HTTP API. Source: broker: totals-listing, lifecycle: "Takeover and
restart", idle-needs-a-fresh-total."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.management.models import QueueTotals
from osrdyne.broker.topology.declarations import is_request_queue_of
from osrdyne.broker.topology.layout import GroupQueue, QueueLayout
from osrdyne.protocol.names import Key, PoolNames


@dataclass(frozen=True, slots=True)
class ListedQueue:
    """The queues of a group in a listing. `ready` and `messages` (None: unknown) may be some seconds old, but are not
    older than `sampled_after` (monotonic). `ready_by_level`: by priority, None is the default level. `whole`: every
    known queue of the group is listed."""

    key: Key
    bound: bool
    ready: int
    messages: int | None
    ready_by_level: Mapping[int | None, int] = field(default_factory=dict)
    whole: bool = True
    sampled_after: float = -math.inf


@dataclass(frozen=True, slots=True)
class MessageTotal:
    """All messages of a running queue or group, in a sample taken after `sampled_after` (monotonic)."""

    messages: int
    sampled_after: float


@dataclass(frozen=True, slots=True)
class Backlog:
    """The content of a group's queues, in a sample taken after `sampled_after` (monotonic). `waiting`: requests that
    no worker has taken; `messages`: all requests, including unacknowledged ones, None if a queue does not report
    them."""

    waiting: int = 0
    messages: int | None = None
    sampled_after: float = -math.inf

    @property
    def unacknowledged(self) -> int | None:
        """Requests that workers have taken and not finished."""
        return None if self.messages is None else max(0, self.messages - self.waiting)


class RequestQueueListing:
    """Lists the request queues of one pool, and ignores all other queues."""

    def __init__(self, management: ManagementClient, names: PoolNames, layout: QueueLayout | None = None) -> None:
        self._management = management
        self._names = names
        self._layout = layout or QueueLayout(names)

    async def _list(self) -> dict[Key, list[tuple[GroupQueue, QueueTotals]]]:
        """The existing queues of each group."""
        found: dict[Key, dict[int | None, QueueTotals]] = {}
        for queue in await self._management.list_queues(self._names.request_queue_prefix):
            known = self._group_of(queue)
            # A queue with other arguments belongs to another program; `declare` reports the conflict when its name is
            # needed (lifecycle: token-channel-never-fails).
            if known is not None and is_request_queue_of(self._names, known[0], queue.arguments):
                found.setdefault(known[0], {})[known[1]] = queue
        return {
            key: [
                (queue, totals[queue.priority])
                for queue in self._layout.queues(key, listed=totals)
                if queue.priority in totals
            ]
            for key, totals in found.items()
        }

    def _group_of(self, queue: QueueTotals) -> tuple[Key, int | None] | None:
        """Key and priority of a request queue. A direct pool has queues of levels if it was a managed pool before."""
        arguments = dict(queue.arguments)
        key = self._names.key_of_queue(queue.name, arguments)
        return self._names.key_of_level_queue(queue.name, arguments) if key is None else (key, None)

    async def list_request_queues(self) -> list[ListedQueue]:
        """Every group that has a queue; `bound` if all queues of used levels are bound by its key."""
        groups = await self._list()
        exchanges = {queue.exchange for queues in groups.values() for queue, _ in queues if queue.used}
        bound = {
            (exchange, binding.queue, binding.routing_key)
            for exchange in exchanges
            for binding in await self._management.list_bindings(exchange)
        }
        return [
            ListedQueue(
                key,
                # Known queues that are not listed count as well: without one of them the group is not bound.
                bound=all(
                    (queue.exchange, queue.name, str(key)) in bound
                    for queue in {*self._layout.existing(key), *(queue for queue, _ in queues)}
                    if queue.used
                ),
                ready=sum(totals.ready or 0 for _, totals in queues),
                messages=_sum(totals for _, totals in queues),
                ready_by_level={queue.priority: totals.ready or 0 for queue, totals in queues},
                whole=self._is_whole(key, queues),
                sampled_after=min((totals.sampled_after for _, totals in queues), default=-math.inf),
            )
            for key, queues in groups.items()
        ]

    async def list_message_totals(self) -> dict[Key, MessageTotal]:
        """Messages by key: ready, unacknowledged, and on their way to a dead letter queue.

        Groups with a queue that is not running are left out, because such a queue reports zero, and so are groups with
        a known queue that is not listed.
        """
        return {
            key: MessageTotal(messages, min(totals.sampled_after for _, totals in queues))
            for key, queues in (await self._list()).items()
            if self._is_whole(key, queues) and (messages := _sum(totals for _, totals in queues)) is not None
        }

    def _is_whole(self, key: Key, queues: Sequence[tuple[GroupQueue, QueueTotals]]) -> bool:
        listed = {queue.priority for queue, _ in queues}
        return listed.issuperset(queue.priority for queue in self._layout.existing(key))

    async def list_level_totals(self) -> dict[tuple[Key, int], MessageTotal]:
        """Messages of each running queue of a priority level, by key and priority."""
        return {
            (key, queue.priority): MessageTotal(totals.messages, totals.sampled_after)
            for key, queues in (await self._list()).items()
            for queue, totals in queues
            if queue.priority is not None and totals.is_running and totals.messages is not None
        }

    async def list_ready(self) -> dict[tuple[Key, int | None], int]:
        """Requests that are ready, by key and priority; some seconds old."""
        return {
            (key, queue.priority): totals.ready or 0
            for key, queues in (await self._list()).items()
            for queue, totals in queues
        }

    async def list_backlogs(self) -> dict[Key, Backlog]:
        """The content of each group's queues; some seconds old."""
        return {
            key: Backlog(
                waiting=sum(totals.ready or 0 for _, totals in queues),
                messages=_sum(totals for _, totals in queues) if self._is_whole(key, queues) else None,
                sampled_after=min((totals.sampled_after for _, totals in queues), default=-math.inf),
            )
            for key, queues in (await self._list()).items()
        }


def _sum(queues: Iterable[QueueTotals]) -> int | None:
    """The messages of these queues; None if one of them does not report them."""
    messages = 0
    for queue in queues:
        if not queue.is_running or queue.messages is None:
            # Counted as zero, an unknown part could prove a queue empty that is not (broker: totals-listing).
            return None
        messages += queue.messages
    return messages
