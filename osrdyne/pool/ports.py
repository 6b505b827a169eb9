"""What the pool asks of the broker, in the pool's own words; `broker/` and `osrdyne.testing` implement it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from osrdyne.amqp import Message
from osrdyne.broker.management.listings import Backlog, ListedQueue, MessageTotal
from osrdyne.broker.management.models import QueueTotals
from osrdyne.broker.queues.outcomes import DeleteOutcome, QueueCheck
from osrdyne.protocol.names import Key, QueueId, WorkerId


class QueueCommands(Protocol):
    """Commands on request queues. Every error but `BrokerConflictError` ends the term."""

    async def declare(self, key: Key) -> None:
        """Make sure the queue exists. Raises `BrokerConflictError` when one exists that is not ours to use."""
        ...

    def adopt(self, key: Key, levels: Iterable[int | None]) -> None:
        """Take over queues of the group that a listing has found, by priority level."""
        ...

    async def bind(self, key: Key) -> None: ...

    def suspect(self, key: Key) -> None:
        """The queue was found unbound: before it is bound or deleted, make sure that it has a leader."""
        ...

    async def unbind(self, key: Key) -> None: ...

    async def delete_if_proven_empty(self, key: Key) -> DeleteOutcome:
        """Delete the queue of an unbound, settled group without workers, if nobody holds a message of it."""
        ...

    async def delete_level(self, key: Key, priority: int) -> DeleteOutcome:
        """Delete the store of a bound group that no route uses any more, if nobody holds a message of it."""
        ...

    async def exists(self, key: Key) -> bool:
        """Whether the queue exists, asked of the broker now."""
        ...

    async def check(self, key: Key) -> QueueCheck:
        """Whether the queues of the group exist and are bound, asked of the broker now. Changes nothing there."""
        ...

    async def consumer_count(self, key: Key) -> int:
        """Consumers of the queue now; 0 when there is no queue."""
        ...

    async def waits_for_consumer(self, key: Key, *, beside: int) -> bool:
        """Whether requests wait in a queue of the group that has no more than `beside` consumers."""
        ...


class RetryQueues(Protocol):
    """The queues where failed requests wait for their next attempt, by their delays in milliseconds."""

    async def declare(self, delays_ms: Collection[int], priorities: Collection[int]) -> dict[int, str]:
        """Have a queue for each of these delays, and the way back to these classes. The delays whose queue is not ours
        to use, and why."""
        ...

    async def leave_default_class(self) -> None: ...

    async def list(self) -> dict[int, QueueTotals]: ...

    async def unbind(self, delay_ms: int) -> None: ...

    async def delete_if_proven_empty(self, delay_ms: int) -> DeleteOutcome: ...


class QueueListings(Protocol):
    """Listings of the pool's request queues. Their figures may be some seconds old."""

    async def list_request_queues(self) -> list[ListedQueue]:
        """Every group that has a queue, with its bindings."""
        ...

    async def list_message_totals(self) -> dict[Key, MessageTotal]:
        """Messages (ready and unacknowledged) by key. Groups with a queue that is not running are left out."""
        ...

    async def list_level_totals(self) -> dict[tuple[Key, int], MessageTotal]:
        """The same for each queue of a priority level, by key and priority."""
        ...

    async def list_backlogs(self) -> dict[Key, Backlog]:
        """Waiting and unacknowledged requests by key."""
        ...

    async def list_ready(self) -> Mapping[QueueId, int]:
        """Waiting requests of each queue."""
        ...


class Publisher(Protocol):
    """The leader's confirmed publisher."""

    async def publish(self, message: Message, *, exchange: str, routing_key: str, mandatory: bool = False) -> None: ...


class WorkerCredentials(Protocol):
    """With which credentials workers connect to the broker."""

    async def uri_for(self, key: Key, worker_id: WorkerId) -> str:
        """The AMQP URI for a worker that is about to start; it holds a password. Raises `BrokerError`."""
        ...

    def release(self, worker_id: WorkerId) -> None:
        """The worker has ended, or did not start. Never waits, never fails."""
        ...


class Lease(Protocol):
    async def confirm(self) -> None:
        """Return if the token channel answered a moment ago, else ask it; raises when leadership is lost."""
        ...
