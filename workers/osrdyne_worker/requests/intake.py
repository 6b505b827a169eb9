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
from osrdyne.aio.signals import WatchCell
from osrdyne.amqp import Channel
from osrdyne.errors import BrokerError
from osrdyne.logs import get_logger
from osrdyne.protocol.names import QueueName
from osrdyne_worker.requests.prefetch import Lane, Lanes
from osrdyne_worker.requests.processor import Processor
from osrdyne_worker.runtime.connection import Link
from osrdyne_worker.runtime.exit import QueueMissing
from osrdyne_worker.runtime.settings import RuntimeSettings

RETRY = Backoff(initial=0.5, factor=1.5, maximum=5.0)

log = get_logger("worker")


class Share(NamedTuple):
    """How one queue is consumed. `rank` 0 is the highest priority; `prefetch` None: one request may wait in the worker,
    however many run."""

    rank: int
    prefetch: int | None


def share_of(queue: QueueName, queues: tuple[QueueName, ...], concurrency: int) -> Share | None:
    """How `queue` is to be consumed when `queues` are, highest priority first; None: not at all.

    A single queue fills every place of the worker. Of several, each may have one request waiting here, so that the
    highest one runs next. With one place, that which runs counts as well: a request that waits behind it in the same
    level would only be kept from other workers.
    """
    if queue not in queues:
        return None
    return Share(queues.index(queue), concurrency if len(queues) == 1 or concurrency == 1 else None)


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
        self._lanes: Lanes | None = None

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
        channel, failures = self._channel, list[BrokerError]()
        log.info("taking requests", queue=self._queue)
        self._processor.intakes += 1
        try:
            async with asyncio.TaskGroup() as group:

                def open_lane(lane: Lane) -> None:
                    group.create_task(self._hand_over(channel, lanes, lane, share), name="intake-lane")

                lanes = self._lanes = Lanes(
                    limit=share.prefetch,
                    free=lambda: self._processor.free_slots,
                    open_lane=open_lane,
                    close_lane=partial(self._close_lane, channel),
                )
                lanes.start()
                while self._share == share:
                    await self._queues.changed()
                lanes.stop()
                if self._share is None:
                    self._backlog.detach()
                else:  # it is consumed again at once: no lower level gets ahead meanwhile
                    self._backlog.expect(self._share.rank)
                await self._link.until_unblocked()
                await asyncio.gather(*(self._close_lane(channel, lane) for lane in lanes.open))
        except* BrokerError as errors:
            failures += _flat(errors)
        finally:
            self._processor.intakes -= 1
        if failures:
            self._lose()
            raise failures[0]
        self._processor.give_back(channel=channel)
        log.info("taking no more requests", queue=self._queue)

    async def _hand_over(self, channel: Channel, lanes: Lanes, lane: Lane, share: Share) -> None:
        """The consumer ends plainly once it is cancelled and everything that had come is handed over."""
        consumer = lane.consumer = await channel.consume(self._queue, prefetch=lane.prefetch)
        self._failures = 0
        if self._share == share:
            self._backlog.attach(share.rank, partial(self._ready, channel, lanes))
        else:
            await self._close_lane(channel, lane)
        async for delivery in consumer:
            if self._share is None:
                await delivery.nack(requeue=True)  # it came before the consumer was cancelled
                continue
            place = lanes.place(lane)
            self._processor.accept(delivery, rank=share.rank, link=self._link, backlog=self._backlog, place=place)

    async def _close_lane(self, channel: Channel, lane: Lane) -> None:
        if lane.consumer is None:
            return  # it closes itself once it is open
        try:
            await channel.cancel(lane.consumer)
        except BrokerError as error:
            lane.consumer.end(error)

    async def _ready(self, channel: Channel, lanes: Lanes) -> int | None:
        """Requests in the queue that have not been handed over to the processor; None where it is not known.

        RabbitMQ says 0 for a queue that does not answer it in time, and then it knows of no consumer either.
        """
        queue = await channel.declare_queue(self._queue, passive=True)
        waiting = queue.ready + sum(lane.consumer.waiting() for lane in lanes.open if lane.consumer is not None)
        return waiting if waiting or queue.consumers else None

    def _lose(self) -> None:
        """What came over the channel is RabbitMQ's again; closing it makes sure of that."""
        self._backlog.detach()
        channel, self._channel = self._channel, None
        if channel is not None:
            self._processor.lose(channel)
            self._link.discard(channel)


def _flat(group: BaseExceptionGroup[BrokerError]) -> list[BrokerError]:
    found: list[BrokerError] = []
    for error in group.exceptions:
        found += _flat(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
