"""The wait queues, where failed requests of a managed pool wait for their next attempt: one queue for each delay.

A worker publishes to `P-retry-xchg`, and a header selects the queue. Wait queues have no consumers: when the
time-to-live of the queue is over, RabbitMQ dead-letters the request, at least once, to `P-retried-xchg`, from where a
header routes it to the work exchange of its priority level. Key, headers and reply address stay the same. The queues
are declared when routes change, and deleted like request queues: over the token channel and proven empty. Used by
`pool.routing.retries`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial

from osrdyne.aio.clock import Clock
from osrdyne.amqp import Delivery
from osrdyne.broker.leadership.channel_pool import LeaderChannels
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.management.models import QueueTotals
from osrdyne.broker.publishing.publisher import publish_until_taken
from osrdyne.broker.queues.durability import QueueDurability
from osrdyne.broker.queues.safe_delete import DeleteOutcome, delete_if_proven_empty
from osrdyne.broker.topology.declarations import NEVER, Exchange, ExchangeBinding, Queue, QueueBinding, Topology
from osrdyne.errors import BrokerConflictError, BrokerNotFoundError, BrokerUnavailableError
from osrdyne.logs import Logger, get_logger
from osrdyne.protocol.names import PoolNames, QueueName
from osrdyne.protocol.retries import CLASS_HEADER, DELAY_HEADER, class_name


def retry_exchanges(names: PoolNames, priorities: Iterable[int]) -> Topology:
    """The exchanges before and behind the wait queues, with the bindings by which requests return to these levels
    and the default level. A request whose level or queue does not exist becomes an orphan, like any request."""
    behind = names.retried_exchange
    levels = [None, *sorted(priorities)]
    return Topology(
        (
            Exchange(names.retry_exchange, "headers"),
            Exchange(behind, "headers", {"alternate-exchange": names.orphan_exchange}),
            *(
                ExchangeBinding(names.work_exchange(one), behind, _when(CLASS_HEADER, class_name(one)))
                for one in levels
            ),
        )
    )


def retry_queues(names: PoolNames, delays_ms: Iterable[int]) -> Topology:
    """The queues of these delays."""
    return Topology(
        tuple(
            Queue(names.retry_queue(delay_ms), retry_queue_arguments(names, delay_ms)) for delay_ms in sorted(delays_ms)
        )
    )


def retry_queue_arguments(names: PoolNames, delay_ms: int) -> dict[str, object]:
    """The arguments of a wait queue, which keeps a request until its next queue has confirmed it (broker:
    at-least-once-dead-lettering)."""
    return {
        "x-queue-type": "quorum",
        "x-message-ttl": delay_ms,
        "x-dead-letter-exchange": names.retried_exchange,
        # A request whose target refuses it stays here and is tried again later.
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
        # A probe that returns a request must not make a dead letter of it.
        "x-delivery-limit": NEVER,
    }


def retry_bindings(names: PoolNames, delays_ms: Iterable[int]) -> Topology:
    """The bindings of these queues; with them workers can publish to the queues."""
    return Topology(
        tuple(
            QueueBinding(
                names.retry_queue(delay_ms), names.retry_exchange, arguments=_when(DELAY_HEADER, str(delay_ms))
            )
            for delay_ms in sorted(delays_ms)
        )
    )


def _when(header: str, value: str) -> dict[str, object]:
    """The arguments of a binding for this header. `all-with-x`: otherwise RabbitMQ ignores headers that begin with
    `x-`."""
    return {"x-match": "all-with-x", header: value}


class RetryQueueCommands:
    """Commands on the wait queues of one pool, for one term."""

    def __init__(
        self,
        *,
        names: PoolNames,
        channels: LeaderChannels,
        durability: QueueDurability,
        management: ManagementClient,
        declare: Callable[[Topology], Awaitable[None]],
        clock: Clock,
    ) -> None:
        self._names = names
        self._token = channels.token
        self._probe_channels = channels.probing
        self._durability = durability
        self._publisher = channels.publisher
        self._management = management
        self._declare = declare
        self._clock = clock
        self._log: Logger = get_logger("retry_queues", pool=names.pool)

    async def declare(self, delays_ms: Collection[int], priorities: Collection[int]) -> dict[int, str]:
        """Declare a queue for each of these delays, and the bindings by which requests return to these levels, whose
        exchanges exist.

        Returns the delays whose queue exists with other arguments, with the reason. Raises `BrokerConflictError` if an
        exchange exists with other arguments.
        """
        # Exchanges first: a binding needs its exchange, and a queue its dead letter exchange.
        await self._declare(retry_exchanges(self._names, priorities))
        refused: dict[int, str] = {}
        for delay_ms in sorted(delays_ms):
            try:
                await self._declare(retry_queues(self._names, [delay_ms]))
            except BrokerConflictError as error:
                # Only routes that need this delay go on without retries.
                refused[delay_ms] = error.message
        # A queue with other arguments is not bound: it could hold requests for another time, or drop them.
        usable = set(delays_ms) - refused.keys()
        if usable:
            await self._persist()  # or a new one could lose what it has confirmed (decision 0020)
            # Last: once it is bound, workers publish to it and rely on its confirms.
            await self._declare(retry_bindings(self._names, usable))
        return refused

    async def leave_default_level(self) -> None:
        """Prepare a direct pool: waiting requests become orphans when they return. Otherwise they would return to a
        queue that is unbound from the clients' exchange and about to be deleted (lifecycle: ready-brings-back)."""
        destination, arguments = self._names.work_exchange(), _when(CLASS_HEADER, class_name(None))
        await self._token.do(
            lambda channel: channel.unbind_exchange(destination, self._names.retried_exchange, arguments=arguments)
        )

    async def list(self) -> dict[int, QueueTotals]:
        """List the existing wait queues, by their delays."""
        listed = await self._management.list_queues(self._names.retry_queue_prefix)
        delays = ((self._names.delay_of_retry_queue(queue.name), queue) for queue in listed)
        return {delay_ms: queue for delay_ms, queue in delays if delay_ms is not None}

    async def unbind(self, delay_ms: int) -> None:
        """Unbind the queue: no request is routed to it any more."""
        queue, exchange = self._names.retry_queue(delay_ms), self._names.retry_exchange
        arguments = _when(DELAY_HEADER, str(delay_ms))
        await self._token.do(lambda channel: channel.unbind_queue(queue, exchange, arguments=arguments))

    async def delete_if_proven_empty(self, delay_ms: int) -> DeleteOutcome:
        """Delete a queue that is unbound and settled, if no message of it is held.

        The caller has seen a listing with a total of zero: a probe does not show requests that RabbitMQ has taken out
        of the queue and not yet delivered (lifecycle: total-for-hidden-messages).
        """
        # Crash within: the queue stays, unbound, and the next leader lists it as unused.
        outcome = await self._delete(self._names.retry_queue(delay_ms))
        if outcome is DeleteOutcome.DELETED:
            await self._persist()  # as for a request queue, before the next one of this name
        return outcome

    async def _persist(self) -> None:
        """Persist all declarations. After a failure the term goes on: only a node that is killed within a second could
        lose requests."""
        try:
            await self._durability.persist()
        except BrokerConflictError as error:
            self._log.warning("queue durability helper failed", error=str(error))

    async def _delete(self, queue: QueueName) -> DeleteOutcome:
        try:
            async with self._probe_channels.borrow() as channel:
                try:
                    return await delete_if_proven_empty(
                        channel,
                        queue,
                        delete=lambda: self._token.do(lambda token: token.delete_queue(queue)),
                        give_back=self._give_back,
                    )
                finally:
                    await channel.close()
        except (BrokerUnavailableError, BrokerNotFoundError) as error:
            self._log.warning("probe failed", queue=queue, error=str(error))
            return DeleteOutcome.NO_EVIDENCE

    async def _give_back(self, delivery: Delivery) -> None:
        """Republish a request that the probe received, as if its delay were over."""
        publish = partial(
            self._publisher.publish, exchange=self._names.retried_exchange, routing_key=delivery.routing_key
        )
        message = delivery.to_message(headers=delivery.headers, expiration=None)
        await publish_until_taken(lambda: publish(message, mandatory=True), clock=self._clock, log=self._log)
