"""The consumers of the controller's own queues: one processor for each, opened in a given order and ended together.

Each has a channel of its own, so that a slow one holds back no other. Used by the leader's term. A processor that fails
ends the task group that it runs in; this module opens no connection and does not decide when the leader's term ends.
`ErrorBoundary`: an unexpected error fails one message, not the leader's term.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from osrdyne.aio.clock import Clock
from osrdyne.amqp import Channel, Consumer, Delivery
from osrdyne.broker.publishing.proofs import Proofs
from osrdyne.errors import (
    BrokerAccessError,
    BrokerError,
    BrokerSilentError,
    BrokerUnavailableError,
    PublishRefusedError,
)
from osrdyne.logs import Logger, get_logger
from osrdyne.processors.expiry.sweeper import ExpirySweeper

PROOF_INTERVAL = 3.0  # Seconds without a message after which a consumer gets a proof.
PROOF_POLL = 0.5
DRAIN_TIMEOUT = 10.0  # Seconds that an orderly end waits for the messages that the consumers have taken.


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor of one queue."""

    queue: str
    prefetch: int
    run: Callable[[Consumer], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class _Running:
    """A processor with its consumer."""

    channel: Channel
    consumer: Consumer
    task: asyncio.Task[None]


class ControllerConsumers:
    """The processors of one leader's term, and the expiry sweeper, which ends together with them."""

    def __init__(
        self,
        processors: Sequence[Processor],
        *,
        open_channel: Callable[[], Awaitable[Channel]],
        sweeper: ExpirySweeper | None = None,
        clock: Clock,
        proofs: Proofs,
        on_finish: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_finish` is called at an orderly end, when no further message arrives."""
        self._processors = processors
        self._open_channel = open_channel
        self._sweeper = sweeper
        self._running: list[_Running] = []
        self._sweeping: list[asyncio.Task[None]] = []
        self._proving: list[asyncio.Task[None]] = []
        self._clock = clock
        self._proofs = proofs
        self._on_finish = on_finish
        self._log: Logger = get_logger("consumers")

    async def start_early(self, group: asyncio.TaskGroup, queue: str) -> None:
        """Consume one queue before the others."""
        await self._start(group, [processor for processor in self._processors if processor.queue == queue])

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Consume every queue that is not consumed yet, in the order given."""
        early = {running.consumer.queue for running in self._running}
        await self._start(group, [processor for processor in self._processors if processor.queue not in early])
        if self._sweeper is not None:
            self._sweeping = [group.create_task(self._sweeper.run(), name="expiry sweeper")]

    async def _start(self, group: asyncio.TaskGroup, processors: Sequence[Processor]) -> None:
        for processor in processors:
            channel = await self._open_channel()
            # A channel for each queue: an error on one closes no other, and a cancel waits for no other queue.
            consumer = await channel.consume(processor.queue, prefetch=processor.prefetch)
            consumer.skips = self._proofs.is_proof
            if self._proofs.are_needed:
                self._proving.append(group.create_task(self._prove(consumer), name=f"proof of {processor.queue}"))
            task = group.create_task(processor.run(consumer), name=f"consumer of {processor.queue}")
            self._running.append(_Running(channel, consumer, task))

    async def _prove(self, consumer: Consumer) -> None:
        """Raise `BrokerUnavailableError` when no messages come to a consumer any more.

        RabbitMQ has then attached it to another queue of the same name, and drops what it delivers to it (broker:
        reattached-consumers). The end of the term closes the channel: RabbitMQ returns these messages, and the next
        term takes them. Crash before a proof is taken: the next leader takes it, and drops it.
        """
        while True:
            received = consumer.received
            await self._clock.sleep(PROOF_INTERVAL)
            if consumer.received != received or not consumer.has_room:
                continue  # messages come, or must not come now
            try:
                await self._proofs.publish(consumer.queue)
            except (PublishRefusedError, BrokerSilentError, BrokerAccessError):
                # A missing queue is a matter of the topology watch; one without a leader delivers nothing; and without
                # permission for the default exchange nothing is proven.
                continue
            until = self._clock.monotonic() + self._proofs.patience
            while consumer.received == received and consumer.has_room:
                if self._clock.monotonic() >= until:
                    raise BrokerUnavailableError(
                        f"The consumer of {consumer.queue} gets no messages: the queue was deleted and declared again."
                    )
                await self._clock.sleep(PROOF_POLL)

    async def finish(self) -> None:
        """Stop consuming and finish the messages that were taken; those not finished in time return to their queue."""
        for proving in self._proving:
            proving.cancel()
        for running in self._running:
            # Cancelled and not closed: messages that were taken can still be acknowledged. A closed channel would
            # return all of them.
            await running.channel.cancel(running.consumer)
        self._on_finish()
        if self._sweeper is not None:
            # After the cancels: no further orphan arrives that a sweep would have to hold back.
            self._sweeper.finish()
        tasks = [*(running.task for running in self._running), *self._sweeping]
        _, late = await asyncio.wait(tasks, timeout=DRAIN_TIMEOUT)
        for task in late:
            self._log.warning("messages return to their queue", consumer=task.get_name())
            task.cancel()


class ErrorBoundary:
    """Logs an unexpected error inside the `with` block and ends the block; then `failed` is true.

    Without it, a message on which a processor fails would end the leader's term, return to its queue, and end each term
    that follows. Errors of the broker pass: they concern the leader's term.
    """

    def __init__(self, delivery: Delivery, log: Logger) -> None:
        self._delivery = delivery
        self._log = log
        self.failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        # Cancellation and loss of the broker pass: in both cases RabbitMQ returns the message by itself.
        if not isinstance(error, Exception) or isinstance(error, BrokerError):
            return False
        self.failed = True
        self._log.error("message not processed", key=self._delivery.routing_key, exc_info=error)
        return True


async def to_dead_letters(delivery: Delivery) -> None:
    """Reject the message: RabbitMQ passes it to the dead letter responder, which answers it or keeps it as poison."""
    # In one step of RabbitMQ: a crash before it returns the message, after it only the dead letter exists.
    await delivery.reject(requeue=False)
