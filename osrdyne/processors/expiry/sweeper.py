"""Removes requests that have expired behind one that has not, where `check_entire_queue_on_cleanup` is on.

The ingress notes the deadlines of what it passes on. Where one has passed behind a later one, RabbitMQ is asked for the
number of requests that wait in that queue now. What the ingress did not pass on is found by listings, whose counts are
some seconds old: requests of an earlier leader, and those that come back from a wait for another attempt.

One queue at a time: hold back what the ingress has for it; attach a consumer of a high priority, to which RabbitMQ
hands everything that is ready in one step, so that no worker gets ahead; let go of the consumer; hand what has expired
to the dead letters; publish the others anew in their order, each with a confirm; only then acknowledge all of them, in
one step.

What a crash leaves, whenever it comes: before the acknowledgement everything goes back to the head of the queue, in its
order. Before the first copy, nothing has changed. After it, the copies are behind what they are copies of. So a request
may be there twice, and the copy says so; none is lost, and none overtakes another. What was handed to the dead letters
and came back is answered again, with the same status. A failure ends the same way, by closing the channel; RabbitMQ may
count it as a delivery, so that a queue is tried a few times only. Source: docs/reference/routes/expiry.md.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from osrdyne.aio.clock import Clock, now_ms
from osrdyne.aio.signals import Wakeup
from osrdyne.amqp import Channel, Consumer, Delivery, Message
from osrdyne.broker.management.models import TOTALS_MAX_AGE
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.errors import BrokerError, OsrdyneError, QueueNotCleanedError
from osrdyne.logs import Logger, get_logger
from osrdyne.metrics import Metrics
from osrdyne.pool.ports import Publisher
from osrdyne.pool.routing.deadlines import PassedDeadlines, Store
from osrdyne.pool.state.observed import QueueStatuses
from osrdyne.pool.state.tracker import PoolStateTracker
from osrdyne.processors.expiry.plan import Cleaning, Held, copy_of, dead_letter_of, decide
from osrdyne.processors.publish_order import Lanes
from osrdyne.protocol.names import Key, QueueName

LOOKS = 2
"""Looks in one `cleanup_interval`: what expires just after a look must be in time, too."""
MIN_PAUSE = 0.1
"""Seconds between two looks when a look takes longer than it should."""
MAX_ASKED = 500
"""Queues that are asked for in one look; the next look continues with the others."""
FIRST_OF_ALL = {"x-priority": 1000}
CREDIT = 65_000
"""Deliveries that RabbitMQ may send at once; it must be more than a queue that is cleaned holds."""
MAX_TAKEN = 20_000
MAX_TAKEN_BYTES = 128 * 2**20
TAKE_TIMEOUT = 10.0
"""Seconds for what was passed on before to be confirmed, and then for the queue to hand over what it has."""
BATCH = 256
"""Copies that are under way at once."""
POLL_INTERVAL = 0.01
READ_AGAIN = 10
"""Intervals after which a queue is read again in a pool with retries: the report that a request was sent to wait may
have been lost."""
MAX_FAILURES = 2
"""Of one queue in one term; each may count as a delivery of all that waits."""


class Ready(Protocol):
    """Tells how many requests wait."""

    async def list_ready(self) -> Mapping[Store, int]: ...


class QueueCleaner:
    """Cleans the queues of one pool in one term. `may_have_returned`: whether a request may have come into a queue
    since a time (monotonic) from its wait for another attempt: such ones nobody noted."""

    def __init__(
        self,
        *,
        layout: QueueLayout,
        tracker: PoolStateTracker,
        board: QueueStatuses,
        lanes: Lanes,
        deadlines: PassedDeadlines,
        ready: Ready,
        count_ready: Callable[[Key, int | None], Awaitable[int]],
        publisher: Publisher,
        open_channel: Callable[[], Awaitable[Channel]],
        may_have_returned: Callable[[Store, float], bool],
        delivery_limit: int,
        interval: float,
        max_clock_skew: float,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._layout = layout
        self._names = layout.names
        self._tracker = tracker
        self._board = board
        self._lanes = lanes
        self.deadlines = deadlines
        self._ready = ready
        self._count_ready = count_ready
        self._publisher = publisher
        self._open_channel = open_channel
        self._may_have_returned = may_have_returned
        self._delivery_limit = delivery_limit
        self._interval = interval
        self._skew_ms = int(max_clock_skew * 1000)
        self._clock = clock
        self._metrics = metrics
        self._failures: Counter[Store] = Counter()
        self._looked_at = clock.monotonic()
        self._read_at: dict[Store, float] = {}
        self._cleaning = asyncio.Lock()
        self._finishing = Wakeup(clock)  # of the loop over passed deadlines
        self._finishing_listings = Wakeup(clock)
        self._is_finishing = False
        self._log: Logger = get_logger("cleaner", pool=self._names.pool)

    async def run(self) -> None:
        """Look at the queues again and again, until `finish`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat(self.look_at_passed, self._finishing), name="queue cleaner, deadlines")
            group.create_task(self._repeat(self.look, self._finishing_listings), name="queue cleaner, listings")

    async def _repeat(self, look: Callable[[], Awaitable[None]], finishing: Wakeup) -> None:
        pause = self._interval / LOOKS
        while not await finishing.wait(pause):
            began = self._clock.monotonic()
            try:
                await look()
            except BrokerError as error:
                self._log.warning("queues cannot be looked at, nothing is cleaned meanwhile", error=str(error))
            pause = max(MIN_PAUSE, self._interval / LOOKS - (self._clock.monotonic() - began))

    def finish(self) -> None:
        """End once the queue at hand is done: what goes back unfinished counts as delivered."""
        self._is_finishing = True
        self._finishing.set()
        self._finishing_listings.set()

    async def look_at_passed(self) -> None:
        """Clean every queue in which a deadline has passed behind a later one, one after the other."""
        due = [store for store in self.deadlines.due(now_ms=now_ms(self._clock)) if self._may_be_cleaned(store)]
        for store in due[:MAX_ASKED]:
            await self._clean_if_due(store)

    async def look(self) -> None:
        """Clean every queue that may need it according to a listing, one after the other."""
        asked_at, known = self._clock.monotonic(), self.deadlines.queues()
        ready = await self._ready.list_ready()
        self.deadlines.forget(known - ready.keys())  # a queue may have been declared since
        self._note_known(ready, asked_at)
        for store, waiting in ready.items():
            if waiting < 2:
                del self._failures[store]  # what comes now has not been counted
            if self._is_due(store, waiting):
                await self._clean_if_due(store)

    async def _clean_if_due(self, store: Store) -> None:
        """Ask RabbitMQ what waits now, and clean the queue if it needs it."""
        key, priority = store
        async with self._cleaning:
            if self._is_finishing:
                return
            self._tracker.hold(key)  # or it could be unbound meanwhile
            try:
                with self._lanes.enter(key, priority) as place:
                    place.hold_back()
                    async with asyncio.timeout(TAKE_TIMEOUT):
                        await place.turn()
                    waiting = await self._count_ready(key, priority)  # and no publish is under way meanwhile
                    if self._is_due(store, waiting):
                        await self._try_to_clean(store)
                    else:
                        self.deadlines.settle(store, waiting, now_ms=now_ms(self._clock))
            except TimeoutError:
                self._log.info("queue not cleaned, a publish to it is not confirmed yet", key=key, priority=priority)
            finally:
                self._tracker.release(key)

    def _may_be_cleaned(self, store: Store) -> bool:
        key, priority = store
        used = priority is None or priority in self._layout.used
        return used and self._board[key].is_bound and self._failures[store] < MAX_FAILURES

    def _is_due(self, store: Store, waiting: int) -> bool:
        key, priority = store
        hides = self.deadlines.may_hide_expired(store, waiting, now_ms=now_ms(self._clock))
        if not (hides or (waiting and self._may_hold_unknown(store))):
            return False
        if waiting > MAX_TAKEN:
            self._log.warning("queue too long to be cleaned", key=key, priority=priority, waiting=waiting)
            return False
        return self._may_be_cleaned(store)

    def _note_known(self, ready: Mapping[Store, int], asked_at: float) -> None:
        """What is empty needs no reading, and what was not there at the latest look had nothing in it then."""
        self._read_at = {
            store: self._read_at.get(store, self._looked_at) if waiting else asked_at - TOTALS_MAX_AGE
            for store, waiting in ready.items()
        }
        self._looked_at = asked_at

    def _may_hold_unknown(self, store: Store) -> bool:
        """Whether a request may be there that neither the ingress has noted nor the latest reading has seen."""
        read_at = self._read_at.get(store, self._looked_at)
        is_long_ago = self._clock.monotonic() > read_at + READ_AGAIN * self._interval
        return self._may_have_returned(store, -math.inf if is_long_ago else read_at)

    async def _try_to_clean(self, store: Store) -> None:
        key, priority = store
        try:
            with self._metrics.cleaning_seconds.time():
                await self._clean(store)
        except Exception as error:  # or it would end this term, and this queue each one that follows
            self._failures[store] += 1
            self._log.warning(
                "queue not cleaned",
                key=key,
                priority=priority,
                error=str(error),
                failures=self._failures[store],
                exc_info=not isinstance(error, OsrdyneError),
            )

    async def _clean(self, store: Store) -> None:
        queue, began = self._names.request_queue(*store), self._clock.monotonic()
        channel = await self._open_channel()
        try:
            taken = await self._take(channel, queue)
            now = now_ms(self._clock)
            cleaning = decide(taken, delivery_limit=self._delivery_limit, now_ms=now, skew_ms=self._skew_ms)
            await self._bury(cleaning, store, queue)
            try:
                await self._put_back(cleaning.kept, store)
            except OsrdyneError:
                for held, _ in cleaning.dead:  # they are answered, whatever becomes of the others
                    await held.delivery.ack()
                raise
            if taken:  # as one: of many, RabbitMQ forgets those it has not passed on when the channel closes
                await channel.ack(taken[-1].tag, multiple=True)
            await channel.ping()  # the acknowledgement has arrived
        finally:
            await channel.close()
        del self._failures[store]
        self._read_at[store] = began
        self.deadlines.replace(store, [held.deadline_ms for held in cleaning.kept])
        self._tell(cleaning, store)

    async def _take(self, channel: Channel, queue: QueueName) -> list[Delivery]:
        """Everything that is ready, in order; it stays unacknowledged. Raises `QueueNotCleanedError`."""
        consumer = await channel.consume(queue, prefetch=CREDIT, arguments=FIRST_OF_ALL)
        reading = asyncio.ensure_future(_read(consumer))
        letting_go = asyncio.ensure_future(self._let_go(channel, consumer))
        try:
            async with asyncio.timeout(TAKE_TIMEOUT):
                await asyncio.wait({reading, letting_go}, return_when=asyncio.FIRST_EXCEPTION)
        except TimeoutError:
            raise QueueNotCleanedError(f"It did not hand over what it has within {TAKE_TIMEOUT:g} s.") from None
        finally:
            reading.cancel()
            letting_go.cancel()
            await asyncio.wait({reading, letting_go})
        for error in [task.exception() for task in (reading, letting_go) if not task.cancelled()]:
            if error is not None:
                raise error
        return reading.result()

    async def _let_go(self, channel: Channel, consumer: Consumer) -> None:
        """Cancel the consumer once nothing is ready any more and all that was sent has arrived."""
        # An answer may overtake deliveries; the second one overtakes none of those before the first (lifecycle: probe).
        # One without a consumer, though ours is there, comes from a queue that has no leader, and says nothing.
        in_succession = 0
        while in_succession < 2:
            queue = await channel.declare_queue(consumer.queue, passive=True)
            in_succession = in_succession + 1 if queue.consumers and not queue.ready else 0
            if not in_succession:
                await self._clock.sleep(POLL_INTERVAL)
        await channel.cancel(consumer)

    async def _bury(self, cleaning: Cleaning, store: Store, queue: QueueName) -> None:
        """Hand over to the dead letter responder, with confirms."""
        letters = [dead_letter_of(held, reason, queue) for held, reason in cleaning.dead]
        await self._publish(letters, exchange=self._names.dead_letter_exchange, store=store)

    async def _put_back(self, kept: Sequence[Held], store: Store) -> None:
        """Publish copies, to the exchange and never to the queue (lifecycle: forward-to-exchange), with confirms."""
        now = now_ms(self._clock)
        copies = [copy_of(held, now_ms=now, skew_ms=self._skew_ms) for held in kept]
        await self._publish(copies, exchange=self._names.work_exchange(store[1]), store=store)

    async def _publish(self, messages: Sequence[Message], *, exchange: str, store: Store) -> None:
        """In their order, with confirms. Raises `BrokerError` or `MessageTooLargeError` when one was not taken."""

        async def attempt(message: Message) -> OsrdyneError | None:
            try:
                await self._publisher.publish(message, exchange=exchange, routing_key=store[0], mandatory=True)
            except OsrdyneError as error:
                return error
            return None

        for first in range(0, len(messages), BATCH):
            async with asyncio.TaskGroup() as group:
                attempts = [group.create_task(attempt(message)) for message in messages[first : first + BATCH]]
            for error in filter(None, (one.result() for one in attempts)):
                raise error

    def _tell(self, cleaning: Cleaning, store: Store) -> None:
        counts = Counter(reason.value for _, reason in cleaning.dead)
        for outcome, count in (*counts.items(), ("kept", len(cleaning.kept))):
            self._metrics.cleaned.labels(outcome=outcome).inc(count)
        self._log.info(
            "queue cleaned", key=store[0], priority=store[1], kept=len(cleaning.kept), dead=len(cleaning.dead)
        )


async def _read(consumer: Consumer) -> list[Delivery]:
    """Everything until the consumer ends. Raises `QueueNotCleanedError` when it is too much to be held."""
    taken: list[Delivery] = []
    size = 0
    async for delivery in consumer:
        taken.append(delivery)
        size += len(delivery.body)
        if size > MAX_TAKEN_BYTES:
            raise QueueNotCleanedError(f"More than {MAX_TAKEN_BYTES} bytes wait in it.")
    return taken
