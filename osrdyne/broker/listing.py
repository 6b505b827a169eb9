"""Listings of a pool's request queues through the management API. Source: BROKER 0.4, LIFECYCLE 8-10, 21."""

from __future__ import annotations

from dataclasses import dataclass

from osrdyne.broker.facts import QueueTotals
from osrdyne.broker.management import ManagementClient
from osrdyne.broker.topology import request_queue_arguments
from osrdyne.protocol.names import Key, PoolNames


@dataclass(frozen=True, slots=True)
class ListedQueue:
    """A request queue as listed; `ready` and `messages` (None: not told) may be seconds old."""

    key: Key
    bound: bool
    ready: int
    messages: int | None


@dataclass(frozen=True, slots=True)
class MessageTotal:
    """All messages of a running queue, in a sample taken after `sampled_after` (monotonic)."""

    messages: int
    sampled_after: float


class RequestQueueListing:
    """Lists the request queues of one pool; queues of anybody else are passed over."""

    def __init__(self, management: ManagementClient, names: PoolNames) -> None:
        self._management = management
        self._names = names

    async def _list(self) -> dict[Key, QueueTotals]:
        queues = {}
        for queue in await self._management.list_queues(self._names.request_queue_prefix):
            key = self._names.key_of_queue(queue.name, dict(queue.arguments))
            # One with other arguments is not ours to use; who needs its name is told so by `declare` (LIFECYCLE 3).
            if key is not None and dict(queue.arguments) == request_queue_arguments(key):
                queues[key] = queue
        return queues

    async def list_request_queues(self) -> list[ListedQueue]:
        """Every request queue of the pool, with whether it is bound to the request exchange by its own key."""
        queues = await self._list()
        bindings = await self._management.list_bindings(self._names.requests_exchange)
        bound = {(binding.queue, binding.routing_key) for binding in bindings}
        return [
            ListedQueue(
                key,
                bound=(queue.name, str(key)) in bound,
                ready=queue.ready or 0,
                messages=queue.messages if queue.is_running else None,
            )
            for key, queue in queues.items()
        ]

    async def list_message_totals(self) -> dict[Key, MessageTotal]:
        """Messages by key, ready and unacknowledged and on their way to a dead letter queue.

        Queues that are not running say zero whatever they hold, so they are left out.
        """
        return {
            key: MessageTotal(queue.messages, queue.sampled_after)
            for key, queue in (await self._list()).items()
            if queue.is_running and queue.messages is not None
        }
