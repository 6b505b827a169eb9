"""Taking requests from one queue: wait for it, consume it, let go when told to.

One intake a queue and link, with a channel of its own, so that what happens to one queue leaves the others alone.
Everything it takes goes to the processor. It never settles a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from osrdyne.aio.backoff import Backoff
from osrdyne.aio.clock import Clock
from osrdyne.aio.watch import WatchCell
from osrdyne.amqp import Channel, Consumer
from osrdyne.errors import BrokerError
from osrdyne.logs import get_logger
from osrdyne.protocol.names import QueueName
from osrdyne_worker.runtime.ending import QueueMissing
from osrdyne_worker.runtime.link import Link
from osrdyne_worker.runtime.processor import Processor
from osrdyne_worker.runtime.settings import RuntimeSettings

RETRY = Backoff(initial=0.5, factor=1.5, maximum=5.0)

log = get_logger("worker")


class Share(NamedTuple):
    """How one queue is consumed. `rank` 0 is the highest priority."""

    rank: int
    prefetch: int


def share_of(queue: QueueName, queues: tuple[QueueName, ...], concurrency: int) -> Share | None:
    """How `queue` is to be consumed when `queues` are, highest priority first; None: not at all.

    A single queue fills every place of the worker. Of several, each may have one request waiting here, so that the
    highest one runs next (PROTOCOL, "Worker loop").
    """
    if queue not in queues:
        return None
    return Share(queues.index(queue), concurrency if len(queues) == 1 else 1)


class Intake:
    """Consumes `queue` for as long as it is among `queues`, the queues that this worker takes requests from now."""

    def __init__(
        self,
        link: Link,
        queue: QueueName,
        *,
        queues: WatchCell[tuple[QueueName, ...]],
        processor: Processor,
        settings: RuntimeSettings,
        give_up: Callable[[QueueMissing], None],
        clock: Clock,
    ) -> None:
        self._link = link
        self._queue = queue
        self._queues = queues
        self._processor = processor
        self._settings = settings
        self._give_up = give_up
        self._clock = clock
        self._channel: Channel | None = None
        self._failures = 0
        self._backlog = processor.backlogs.of(queue)

    @property
    def _share(self) -> Share | None:
        return share_of(self._queue, self._queues.value, self._settings.concurrency)

    async def run(self) -> None:
        """Until the link is lost (`BrokerError`)."""
        try:
            while True:
                share = self._share
                if share is None:
                    await self._queues.changed()
                else:
                    await self._take(share)
        finally:
            self._lose()

    async def _take(self, share: Share) -> None:
        if not self._failures:
            self._backlog.expect(share.rank)
        try:
            if await self._queue_exists():
                await self._consume(share)
        except BrokerError as error:
            if self._link.is_closed:
                raise
            self._failures += 1
            self._backlog.miss()
            log.warning("a request queue cannot be consumed", queue=self._queue, reason=str(error))
            await self._clock.sleep(RETRY.delay(self._failures))

    async def _queue_exists(self) -> bool:
        """Wait for the queue; False when it is not wanted any more."""
        since, attempts = self._clock.monotonic(), 0
        while not await self._link.queue_exists(self._queue):
            attempts += 1
            self._backlog.miss()
            missing_for = self._clock.monotonic() - since
            if self._share is None:
                return False
            if missing_for >= self._settings.queue_missing_timeout:
                self._give_up(QueueMissing(f"The request queue {self._queue} was missing for {missing_for:.0f} s."))
            if attempts == 1:
                log.warning("the request queue does not exist", queue=self._queue)
            left = self._settings.queue_missing_timeout - missing_for
            await self._clock.sleep(min(RETRY.delay(attempts), max(0.05, left)))
        return True

    async def _consume(self, share: Share) -> None:
        """Hand deliveries over until the share changes; a broken consumer loses the channel and raises."""
        if self._channel is None or self._channel.is_closed:
            self._channel = await self._link.connection.channel()
        channel = self._channel
        try:
            consumer = await channel.consume(self._queue, prefetch=share.prefetch)
            log.info("taking requests", queue=self._queue)
            self._failures = 0
            self._backlog.attach(share.rank, partial(self._ready, channel, consumer))
            await self._hand_over(channel, consumer, share)
        except BrokerError:
            self._lose()
            raise
        log.info("taking no more requests", queue=self._queue)

    async def _hand_over(self, channel: Channel, consumer: Consumer, share: Share) -> None:
        """The consumer ends plainly once it is cancelled and everything that had come is handed over."""
        watch = asyncio.create_task(self._cancel_when_changed(channel, consumer, share), name="intake-watch")
        try:
            async for delivery in consumer:
                self._processor.accept(delivery, rank=share.rank, link=self._link, backlog=self._backlog)
        finally:
            watch.cancel()
            await asyncio.wait({watch})
        self._processor.give_back(channel=channel)

    async def _ready(self, channel: Channel, consumer: Consumer) -> int | None:
        """Requests in the queue that have not been handed over to the processor; None where it is not known.

        RabbitMQ says 0 for a queue that does not answer it in time, and then it knows of no consumer either (BROKER 1).
        """
        queue = await channel.declare_queue(self._queue, passive=True)
        waiting = queue.ready + consumer.waiting()
        return waiting if waiting or queue.consumers else None

    async def _cancel_when_changed(self, channel: Channel, consumer: Consumer, share: Share) -> None:
        while self._share == share:
            await self._queues.changed()
        if self._share is None:
            self._backlog.detach()
        else:  # it is consumed again at once: nobody of a lower class gets ahead meanwhile
            self._backlog.expect(self._share.rank)
        await self._link.until_unblocked()
        try:
            await channel.cancel(consumer)
        except BrokerError as error:
            consumer.end(error)

    def _lose(self) -> None:
        """What came over the channel is RabbitMQ's again; closing it makes sure of that."""
        self._backlog.detach()
        channel, self._channel = self._channel, None
        if channel is not None:
            self._processor.lose(channel)
            self._link.discard(channel)
