"""Takes requests from one queue: wait for the queue, consume it, stop when the controller requests it.

There is one intake for each queue and broker connection, with a channel of its own: a failure of one queue does not
affect the others. The intake passes deliveries to the processor, and settles only those that arrive after its stop.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from osrdyne.aio.clock import Backoff
from osrdyne.aio.signals import WatchCell
from osrdyne.amqp import Channel
from osrdyne.errors import BrokerError
from osrdyne.logs import get_logger
from osrdyne.protocol.names import PRIORITIES, QueueName, priority_of
from osrdyne_worker.requests.processor import Processor
from osrdyne_worker.requests.scheduling.prefetch import Prefetch, QueueConsumer
from osrdyne_worker.runtime.connection import BrokerConnection
from osrdyne_worker.runtime.exit import QueueMissing
from osrdyne_worker.runtime.settings import RuntimeContext

RETRY = Backoff(initial=0.5, factor=1.5, maximum=5.0)

log = get_logger("worker")


class Share(NamedTuple):
    """How a queue is consumed. `prefetch`: the requests that may be in the worker; None: one may wait, however many
    run."""

    prefetch: int | None


def rank_of(queue: QueueName) -> int:
    """The priority of the requests of a queue; 0 is the highest. It does not depend on the queues that are consumed
    with it, so that requests that wait in the worker keep their place when these change."""
    level = priority_of(queue)
    return len(PRIORITIES) if level is None else level


def share_of(queue: QueueName, queues: tuple[QueueName, ...], concurrency: int) -> Share | None:
    """The share of `queue` when `queues` are consumed; None: it is not consumed.

    A single queue fills all slots of the worker. Of several queues, one request each may wait in the worker, which runs
    the highest one next. With one slot the running request counts as well: a second request of the same queue would
    wait behind it, while other workers could run it.
    """
    if queue not in queues:
        return None
    return Share(concurrency if len(queues) == 1 or concurrency == 1 else None)


def more_for_batches(share: Share, largest_batch: int) -> int:
    """The additional prefetch while a worker has only requests of batch handlers; 0 without batch handlers. With the
    share it is enough for one batch that runs and another one that is collected."""
    return max(0, 2 * largest_batch - (share.prefetch or 0)) if largest_batch > 1 else 0


class Intake:
    """Consumes `queue` while it is among `queues`, the queues that this worker consumes now."""

    def __init__(
        self,
        runtime: RuntimeContext,
        broker: BrokerConnection,
        queue: QueueName,
        *,
        queues: WatchCell[tuple[QueueName, ...]],
        processor: Processor,
    ) -> None:
        self._runtime = runtime
        self._clock = runtime.clock
        self._broker = broker
        self._queue = queue
        self._rank = rank_of(queue)
        self._queues = queues
        self._processor = processor
        # One level for each queue, not for each connection: requests of a lost connection may still run.
        self._level = processor.levels.of(queue)
        self._channel: Channel | None = None
        self._failures = 0

    @property
    def _share(self) -> Share | None:
        return share_of(self._queue, self._queues.value, self._runtime.settings.concurrency)

    async def run(self) -> None:
        """Run until the broker connection is lost. Raises `BrokerError` then."""
        try:
            while True:
                share = self._share
                if share is None:
                    await self._queues.changed()
                else:
                    await self._take(share)
        finally:
            self._lose_channel()

    async def _take(self, share: Share) -> None:
        """Wait for the queue and consume it. After a failure, wait for the back-off."""
        if not self._failures:
            # Not after a failure: a queue that cannot be consumed must not block the levels below it.
            self._level.expect(self._rank)
        try:
            if await self._queue_exists():
                await self._consume(share)
        except BrokerError as error:
            if self._broker.is_closed:
                # The loss of the connection ends all intakes; only a failure of this queue is retried here.
                raise
            self._failures += 1
            self._level.unreachable()
            log.warning("request queue cannot be consumed", queue=self._queue, reason=str(error))
            await self._clock.sleep(RETRY.delay(self._failures))

    async def _queue_exists(self) -> bool:
        """Wait until the queue exists; False if it must not be consumed any more."""
        timeout = self._runtime.settings.queue_missing_timeout
        since, attempts = self._clock.monotonic(), 0
        while not await self._broker.queue_exists(self._queue):
            attempts += 1
            self._level.unreachable()
            missing_for = self._clock.monotonic() - since
            if self._share is None:
                # The controller removes a queue from the list before it deletes it: no error then.
                return False
            if missing_for >= timeout:
                reason = f"The request queue {self._queue} was missing for {missing_for:.0f} s."
                # The group may have ended. The controller starts another worker if the key needs one.
                self._runtime.request_exit(QueueMissing(reason))
            if attempts == 1:
                log.warning("request queue missing", queue=self._queue)
            await self._clock.sleep(min(RETRY.delay(attempts), max(0.05, timeout - missing_for)))
        return True

    async def _consume(self, share: Share) -> None:
        """Consume until there is no share. If a consumer fails, closes the channel and raises `BrokerError`."""
        # One channel for all shares: running requests are acknowledged on the channel that delivered them.
        if self._channel is None or self._channel.is_closed:
            self._channel = await self._broker.connection.channel()
        channel, failures = self._channel, list[BrokerError]()
        log.info("taking requests", queue=self._queue)
        # Until all consumers are cancelled: a suspect runs alone only when no queue can deliver any more.
        self._processor.intakes += 1
        try:
            async with asyncio.TaskGroup() as group:
                consumers = _Consumers(self, channel, share, group)
                try:
                    while (now := self._share) is not None:
                        # Requests in the worker stay there: RabbitMQ would deliver them behind later ones, and count
                        # their return as a failed delivery (before 4.3).
                        consumers.use(now)
                        await self._queues.changed()
                finally:
                    # Before the cancels: a request that begins now must not open a further consumer.
                    consumers.stop()
                self._level.detach()
                # RabbitMQ does not read from a blocked connection: the answer to the cancel would time out.
                await self._broker.until_unblocked()
                # The channel stays open: running requests are acknowledged on it later.
                await consumers.close()
        except* BrokerError as errors:
            failures += _flat(errors)
        finally:
            self._processor.intakes -= 1
        if failures:
            self._lose_channel()
            # The first error is enough: it has closed the channel of all consumers.
            raise failures[0]
        # Requests that have not begun. RabbitMQ delivers them to another worker, or here when the queue is consumed
        # again. While a suspect runs alone they wait here instead, if a return would make suspects of them.
        if not (self._processor.runs_alone and self._broker.counts_returns):
            self._processor.requeue(channel=channel)
        log.info("no longer taking requests", queue=self._queue)

    def _lose_channel(self) -> None:
        """Close the channel: RabbitMQ then requeues its unacknowledged requests."""
        self._level.detach()
        # First, so that a second call does nothing.
        channel, self._channel = self._channel, None
        if channel is not None:
            # Before the close, after which RabbitMQ requeues the requests.
            self._processor.lose(channel)
            self._broker.discard(channel)


class _Consumers:
    """The AMQP consumers of one intake, as its prefetch opens and closes them."""

    def __init__(self, intake: Intake, channel: Channel, share: Share, group: asyncio.TaskGroup) -> None:
        self._intake = intake
        self._channel = channel
        self._group = group
        self._prefetch = Prefetch(
            limit=share.prefetch,
            more_for_batches=more_for_batches(share, intake._processor.largest_batch),
            free_slots=lambda: intake._processor.free_slots,
            open_consumer=self._open,
            close_consumer=self._close,
            close_soon=self._close_soon,
        )
        self._prefetch.start()

    def use(self, share: Share) -> None:
        """Change the share. Requests that have arrived stay in the worker."""
        self._prefetch.use(
            share.prefetch, more_for_batches=more_for_batches(share, self._intake._processor.largest_batch)
        )

    def stop(self) -> None:
        """Open no further consumers."""
        self._prefetch.stop()

    async def close(self) -> None:
        await asyncio.gather(*(self._close(consumer) for consumer in self._prefetch.open))

    def _open(self, opening: QueueConsumer) -> None:
        # In one task group: when one consumer fails, all of them end and the channel is replaced.
        self._group.create_task(self._hand_over(opening), name="intake-consumer")

    def _close_soon(self, closing: QueueConsumer) -> None:
        self._group.create_task(self._close(closing), name="intake-consumer-close")

    async def _hand_over(self, opening: QueueConsumer) -> None:
        """Consume, and pass each delivery to the processor. Returns when the consumer is cancelled and drained."""
        try:
            await self._consume(opening)
        except BaseException:
            self.stop()  # the task group aborts next, and accepts no further tasks then
            raise

    async def _consume(self, opening: QueueConsumer) -> None:
        intake = self._intake
        consumer = opening.consumer = await self._channel.consume(intake._queue, prefetch=opening.prefetch)
        # RabbitMQ has confirmed the consumer: the back-off begins again with the next failure.
        intake._failures = 0
        if intake._share is not None and opening in self._prefetch.open:
            intake._level.attach(intake._rank, self._count_ready)
        else:
            # The queue is not consumed any more, or the consumer is no longer needed.
            await self._close(opening)
        async for delivery in consumer:
            if intake._share is None:
                # It arrived between the stop and the cancel of the consumer: another worker gets it.
                await intake._processor.return_unused(delivery, intake._broker)
                continue
            intake._processor.accept(
                delivery,
                priority=intake._rank,
                broker=intake._broker,
                level=intake._level,
                held=self._prefetch.hold(opening),
            )

    async def _close(self, closing: QueueConsumer) -> None:
        if closing.consumer is None:
            return  # `_consume` closes it when RabbitMQ has confirmed it
        try:
            await self._channel.cancel(closing.consumer)
        except BrokerError as error:
            # `_consume` raises the same error, which ends all consumers of the queue.
            closing.consumer.end(error)

    async def _count_ready(self) -> int | None:
        """Count the requests of the queue that the processor has not received; None if unknown.

        For a queue whose leader does not answer in time, RabbitMQ reports neither requests nor consumers.
        """
        queue = await self._channel.declare_queue(self._intake._queue, passive=True)
        # RabbitMQ counts these as delivered, but the processor has not received them yet.
        buffered = sum(one.consumer.waiting() for one in self._prefetch.open if one.consumer is not None)
        waiting = queue.ready + buffered
        # No requests and not even the consumers of this worker: the queue has no leader.
        return waiting if waiting or queue.consumers else None


def _flat(group: BaseExceptionGroup[BrokerError]) -> list[BrokerError]:
    found: list[BrokerError] = []
    for error in group.exceptions:
        found += _flat(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
