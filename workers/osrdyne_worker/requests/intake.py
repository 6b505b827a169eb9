"""Takes requests from one queue: wait for the queue, consume it, stop when the controller requests it.

There is one intake for each queue and broker connection, with a channel of its own: trouble with one queue does not
affect the others. Deliveries go to the processor; an intake settles only those that came after its stop.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from osrdyne.aio.clock import Backoff
from osrdyne.aio.signals import WatchCell
from osrdyne.amqp import Channel
from osrdyne.errors import BrokerError
from osrdyne.logs import get_logger
from osrdyne.protocol.names import QueueName
from osrdyne_worker.requests.processor import Processor
from osrdyne_worker.requests.scheduling.prefetch import Prefetch, QueueConsumer
from osrdyne_worker.runtime.connection import BrokerConnection
from osrdyne_worker.runtime.exit import QueueMissing
from osrdyne_worker.runtime.settings import RuntimeContext

RETRY = Backoff(initial=0.5, factor=1.5, maximum=5.0)

log = get_logger("worker")


class Share(NamedTuple):
    """How a queue is consumed. `priority`: 0 is the highest. `prefetch`: None: one request may wait in the worker,
    however many run."""

    priority: int
    prefetch: int | None


def share_of(queue: QueueName, queues: tuple[QueueName, ...], concurrency: int) -> Share | None:
    """The share of `queue` when `queues` are consumed, highest priority first; None: it is not consumed.

    A single queue fills all slots of the worker. Of several queues, each may have one request waiting here, so that the
    worker can run the highest one next. With one slot the running request counts as well: a request that waits behind
    it in the same queue would only be withheld from other workers.
    """
    if queue not in queues:
        return None
    return Share(queues.index(queue), concurrency if len(queues) == 1 or concurrency == 1 else None)


def more_for_batches(share: Share, largest_batch: int) -> int:
    """How many requests beyond its share a worker gets while it has only requests of batch handlers: together as many
    as one batch that runs and another one that is collected can hold. 0 without batch handlers."""
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
        self._queues = queues
        self._processor = processor
        # One level for each queue, whichever connection consumes it: requests that still run go on counting in it.
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
        """Wait for the queue and consume it; wait a moment after a failure."""
        if not self._failures:
            # Not after a failure: a queue that cannot be consumed must not block the levels below it.
            self._level.expect(share.priority)
        try:
            if await self._queue_exists():
                await self._consume(share)
        except BrokerError as error:
            if self._broker.is_closed:
                # The loss of the connection ends all intakes at once; only trouble with this one queue is retried here.
                raise
            # The other queues go on: they have channels of their own.
            self._failures += 1
            self._level.unreachable()
            log.warning("request queue cannot be consumed", queue=self._queue, reason=str(error))
            await self._clock.sleep(RETRY.delay(self._failures))

    async def _queue_exists(self) -> bool:
        """Wait for the queue; False when it is not to be consumed any more."""
        timeout = self._runtime.settings.queue_missing_timeout
        since, attempts = self._clock.monotonic(), 0
        while not await self._broker.queue_exists(self._queue):
            attempts += 1
            self._level.unreachable()
            missing_for = self._clock.monotonic() - since
            if self._share is None:
                # The controller takes a queue out of the list before it deletes it: a missing queue is then no fault.
                return False
            if missing_for >= timeout:
                reason = f"The request queue {self._queue} was missing for {missing_for:.0f} s."
                # The group has ended, or the worker was started for a queue that will not come: the controller decides
                # what follows.
                self._runtime.request_exit(QueueMissing(reason))
            if attempts == 1:
                log.warning("request queue missing", queue=self._queue)
            await self._clock.sleep(min(RETRY.delay(attempts), max(0.05, timeout - missing_for)))
        return True

    async def _consume(self, share: Share) -> None:
        """Consume until the share changes. Loses the channel and raises `BrokerError` when a consumer fails."""
        # Kept from one share to the next: running requests are acknowledged on the channel that delivered them.
        if self._channel is None or self._channel.is_closed:
            self._channel = await self._broker.connection.channel()
        channel, failures = self._channel, list[BrokerError]()
        log.info("taking requests", queue=self._queue)
        # Counted until all consumers are cancelled: a suspect runs alone only when no queue can deliver any more.
        self._processor.intakes += 1
        try:
            async with asyncio.TaskGroup() as group:
                consumers = _Consumers(self, channel, share, group)
                try:
                    while self._share == share:
                        await self._queues.changed()
                finally:
                    # Before the cancels: a request that begins now must not open one more consumer.
                    consumers.stop()
                if self._share is None:
                    self._level.detach()
                else:  # it is consumed again at once: no lower level may go first meanwhile
                    self._level.expect(self._share.priority)
                # While RabbitMQ blocks the connection it would not read the cancel, and the answer would time out.
                await self._broker.until_unblocked()
                # Cancelled and not closed: running requests keep their deliveries and are acknowledged later.
                await consumers.close()
        except* BrokerError as errors:
            failures += _flat(errors)
        finally:
            self._processor.intakes -= 1
        if failures:
            self._lose_channel()
            # One error is enough to log: the channel of all consumers of this queue is closed because of it.
            raise failures[0]
        # What was received and has not begun: another worker of the group, or the next share, gets it.
        self._processor.requeue(channel=channel)
        log.info("no longer taking requests", queue=self._queue)

    def _lose_channel(self) -> None:
        """Close the channel: RabbitMQ then requeues its unacknowledged requests."""
        self._level.detach()
        # Taken before the close, so that a second call closes nothing and a new channel is opened next time.
        channel, self._channel = self._channel, None
        if channel is not None:
            # Before the close, which returns the requests to their queue: their handlers stop here.
            self._processor.lose(channel)
            self._broker.discard(channel)


class _Consumers:
    """The AMQP consumers of one intake with one share, as its prefetch opens and closes them."""

    def __init__(self, intake: Intake, channel: Channel, share: Share, group: asyncio.TaskGroup) -> None:
        self._intake = intake
        self._channel = channel
        self._share = share
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

    def stop(self) -> None:
        """Open no further consumers."""
        self._prefetch.stop()

    async def close(self) -> None:
        await asyncio.gather(*(self._close(consumer) for consumer in self._prefetch.open))

    def _open(self, opening: QueueConsumer) -> None:
        # In the task group of the share: when one consumer fails, all of them end and the channel is replaced.
        self._group.create_task(self._hand_over(opening), name="intake-consumer")

    def _close_soon(self, closing: QueueConsumer) -> None:
        self._group.create_task(self._close(closing), name="intake-consumer-close")

    async def _hand_over(self, opening: QueueConsumer) -> None:
        """Consume, and give each delivery to the processor. Ends once the consumer is cancelled and drained."""
        try:
            await self._consume(opening)
        except BaseException:
            self.stop()  # before the task group knows it, which takes no further tasks then
            raise

    async def _consume(self, opening: QueueConsumer) -> None:
        intake = self._intake
        consumer = opening.consumer = await self._channel.consume(intake._queue, prefetch=opening.prefetch)
        # RabbitMQ has confirmed the consumer: the next failure waits for the shortest delay again.
        intake._failures = 0
        if intake._share == self._share and opening in self._prefetch.open:
            intake._level.attach(self._share.priority, self._count_ready)
        else:
            # The share changed while RabbitMQ confirmed this consumer, or it is not needed any more.
            await self._close(opening)
        async for delivery in consumer:
            if intake._share is None:
                # Never accepted: the worker has stopped taking requests of this queue, and another one gets it.
                await delivery.nack(requeue=True)  # it arrived before the consumer was cancelled
                continue
            intake._processor.accept(
                delivery,
                priority=self._share.priority,
                broker=intake._broker,
                level=intake._level,
                held=self._prefetch.hold(opening),
            )

    async def _close(self, closing: QueueConsumer) -> None:
        if closing.consumer is None:
            return  # `_consume` closes it once RabbitMQ has confirmed it
        try:
            await self._channel.cancel(closing.consumer)
        except BrokerError as error:
            # The reader of this consumer ends with the same error, and with it the share.
            closing.consumer.end(error)

    async def _count_ready(self) -> int | None:
        """Requests of the queue that the processor has not received; None if unknown.

        RabbitMQ reports 0 for a queue whose leader does not answer in time; it reports no consumer either then.
        """
        queue = await self._channel.declare_queue(self._intake._queue, passive=True)
        # RabbitMQ counts them as delivered, the processor has not seen them yet.
        buffered = sum(one.consumer.waiting() for one in self._prefetch.open if one.consumer is not None)
        waiting = queue.ready + buffered
        # None of our own consumers is counted: the answer comes from a queue without a leader and proves nothing.
        return waiting if waiting or queue.consumers else None


def _flat(group: BaseExceptionGroup[BrokerError]) -> list[BrokerError]:
    found: list[BrokerError] = []
    for error in group.exceptions:
        found += _flat(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
