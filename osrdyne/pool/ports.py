"""The interfaces of the pool to RabbitMQ. `osrdyne.broker` implements them, `osrdyne.testing` for tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from osrdyne.amqp import Message
from osrdyne.auth.decision import AccessRefusal
from osrdyne.auth.grants import Principal
from osrdyne.broker.management.listings import Backlog, ListedQueue, MessageTotal
from osrdyne.broker.management.models import QueueTotals
from osrdyne.broker.queues.safe_delete import DeleteOutcome, QueueCheck
from osrdyne.protocol.names import Key, QueueId, WorkerId


class TokenVerifier(Protocol):
    """Whose bearer token a request presents. The API verifies its own requests with the same one."""

    def identify_cached(self, token: str) -> Principal | AccessRefusal | None:
        """The principal, or why the token is refused; None if the answer needs `identify`."""
        ...

    async def identify(self, token: str) -> Principal | AccessRefusal:
        """The same; verifies signatures in a thread, and may wait some seconds for keys."""
        ...

    async def named(self, name: str) -> Principal | AccessRefusal:
        """The principal of the API token with this name, or why the token is not valid."""
        ...


class QueueCommands(Protocol):
    """Commands on request queues. Every error except `BrokerConflictError` ends the leader's term."""

    async def declare(self, key: Key) -> None:
        """Declare the queues of the group. Raises `BrokerConflictError` if one exists with other arguments."""
        ...

    def adopt(self, key: Key, levels: Iterable[int | None]) -> None:
        """Take over queues of the group that a listing has found, by priority level."""
        ...

    async def bind(self, key: Key) -> None: ...

    def suspect(self, key: Key) -> None:
        """Check that the queue has a leader before it is bound or deleted: it was found unbound."""
        ...

    async def unbind(self, key: Key) -> None: ...

    async def delete_if_proven_empty(self, key: Key) -> DeleteOutcome:
        """Delete the queues of an unbound, settled group without workers if all its messages are accounted for."""
        ...

    async def delete_level(self, key: Key, priority: int) -> DeleteOutcome:
        """Delete the queue of a priority level that no route uses any more, if it holds no message."""
        ...

    async def exists(self, key: Key) -> bool:
        """Ask RabbitMQ whether the queue exists."""
        ...

    async def check(self, key: Key) -> QueueCheck:
        """Ask RabbitMQ whether the queues of the group exist and are bound. Changes nothing in RabbitMQ."""
        ...

    async def is_consumed(self, key: Key, *, beside: int) -> bool:
        """Whether more than `beside` connections consume the queue of the group. A worker has one connection, and may
        have several consumers of a queue on it."""
        ...

    async def waits_for_consumer(self, key: Key, *, beside: int) -> bool:
        """Whether requests wait in a queue of the group that no more than `beside` connections consume."""
        ...


class RetryQueues(Protocol):
    """The queues where failed requests wait for their next attempt, identified by their delay in milliseconds."""

    async def declare(self, delays_ms: Collection[int], priorities: Collection[int]) -> dict[int, str]:
        """Declare a queue for each delay, and the bindings by which requests return to these priority levels.
        Returns the delays whose queue exists with other arguments, with the reason."""
        ...

    async def leave_default_level(self) -> None: ...

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
    """The credentials with which workers connect to RabbitMQ."""

    async def uri_for(self, key: Key, worker_id: WorkerId) -> str:
        """Return the AMQP URI, with a password, for a worker that is about to start. Raises `BrokerError`."""
        ...

    async def uri_for_process(self, worker_id: WorkerId) -> str:
        """The same for a pooled process, which serves no requests itself. Raises `BrokerError`."""
        ...

    def keep(self, worker_id: WorkerId) -> bool:
        """Keep the credentials of a start that is repeated under the same worker id; False if there are none."""
        ...

    def release(self, worker_id: WorkerId) -> None:
        """Release the credentials of a worker that has ended or did not start. Does not wait and does not fail."""
        ...


class Lease(Protocol):
    """The right of the leader to act (lifecycle: lease)."""

    async def confirm(self, *, since: float | None = None) -> None:
        """Return if the token channel answered recently, and answered a command that was sent after `since`
        (monotonic); otherwise ask it. Raises `LeadershipLostError`."""
        ...
