"""The expiry sweeper: removes expired requests that wait behind others, where `check_entire_queue_on_cleanup` is on.

RabbitMQ removes expired requests only at the head of a queue. The ingress notes the deadlines of the requests that it
publishes. When one has passed behind a later one, the sweeper asks RabbitMQ how many requests wait in that queue now.
Listings, whose counts are some seconds old, find the queues with requests that this leader did not publish: those of an
earlier leader, and those that return from a wait for another attempt.

One queue is swept at a time: hold back the publishes of the ingress to it; attach a consumer of a high priority, to
which RabbitMQ delivers all ready requests in one step, ahead of the workers; cancel the consumer; publish the expired
requests to the dead letter exchange; publish copies of the others in their order, each with a confirm; then acknowledge
all of them in one step.

A crash before the acknowledgement returns everything to the head of the queue, in order. Before the first copy, nothing
has changed. After it, the copies stand behind their originals: a request may be in the queue twice, its copy is marked
as a possible duplicate, none is lost and none overtakes another. A request that was dead-lettered and returned is
answered again with the same status. A failed sweep closes the channel, with the same effect; RabbitMQ may count that as
a delivery of each request, so the sweeper tries a queue only `MAX_FAILURES` times. Source:
docs/reference/routes/expiry.md.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

from osrdyne.aio.clock import now_ms
from osrdyne.aio.signals import Wakeup
from osrdyne.amqp import Channel, Consumer, Delivery, Message
from osrdyne.broker.management.models import TOTALS_MAX_AGE
from osrdyne.broker.session import LeaderSession
from osrdyne.errors import BrokerError, OsrdyneError, QueueNotSweptError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import RequestQueues, TermContext
from osrdyne.pool.ports import QueueListings
from osrdyne.pool.routing.deadlines import ForwardedDeadlines
from osrdyne.pool.routing.routes import ActiveRoutes
from osrdyne.pool.state.groups.tracker import PoolStateTracker
from osrdyne.processors.expiry.plan import SweepPlan, TakenRequest, copy_of, dead_letter_of, plan_sweep
from osrdyne.processors.publish_order import PublishOrder
from osrdyne.protocol.names import Key, QueueId, QueueName

# Checks in one `cleanup_interval`: a request that expires just after a check must be removed in time, too.
CHECKS = 2
MIN_PAUSE = 0.1  # Seconds between two checks when a check takes longer than its share of the interval.
MAX_CHECKED = 500  # Queues that one check asks RabbitMQ about; the next check continues with the others.
CONSUME_FIRST = {"x-priority": 1000}
PREFETCH = 65_000  # Deliveries that RabbitMQ may send at once; more than the largest queue that is swept holds.
MAX_TAKEN = 20_000
MAX_TAKEN_BYTES = 128 * 2**20
TAKE_TIMEOUT = 10.0  # Seconds for earlier publishes to be confirmed, and then for the queue to deliver everything.
BATCH = 256  # Copies that are unconfirmed at once.
POLL_INTERVAL = 0.01
# Intervals after which a queue is swept again in a pool with retries: the report that a request waits for another
# attempt may have been lost.
SWEEP_AGAIN = 10
# Failed sweeps of one queue in a leader's term; each may count as a delivery of every request in it.
MAX_FAILURES = 2


class ExpirySweeper:
    """Sweeps the queues of one pool during one leader's term. `deadlines`: noted by the ingress for each publish."""

    def __init__(
        self,
        context: TermContext,
        *,
        queues: RequestQueues,
        tracker: PoolStateTracker,
        listings: QueueListings,
        routes: ActiveRoutes,
        publish_order: PublishOrder,
        session: LeaderSession,
        limit_of: Callable[[Key], int],
    ) -> None:
        """`limit_of`: the delivery limit of a key."""
        requests = context.settings.requests
        self._names, self._clock, self._metrics = context.names, context.clock, context.metrics
        self._layout, self._queue_status, self._queue_commands = queues.layout, queues.status, queues.commands
        self._tracker = tracker
        self._listings = listings
        self._routes = routes
        self._publish_order = publish_order
        self._session = session
        self._limit_of = limit_of
        self._interval = requests.cleanup_interval
        self.deadlines = ForwardedDeadlines()
        self._failures: Counter[QueueId] = Counter()
        self._listed_at = self._clock.monotonic()
        self._swept_at: dict[QueueId, float] = {}
        self._sweeping = asyncio.Lock()
        self._stop_deadlines = Wakeup(self._clock)
        self._stop_listings = Wakeup(self._clock)
        self._is_finishing = False
        self._log: Logger = get_logger("sweeper", pool=self._names.pool)

    async def run(self) -> None:
        """Check the queues repeatedly, until `finish`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat(self.check_deadlines, self._stop_deadlines), name="sweep by deadlines")
            group.create_task(self._repeat(self.check_listing, self._stop_listings), name="sweep by listing")

    async def _repeat(self, check: Callable[[], Awaitable[None]], stop: Wakeup) -> None:
        pause = self._interval / CHECKS
        # `stop` ends the loop between two checks: a sweep under way is finished first.
        while not await stop.wait(pause):
            began = self._clock.monotonic()
            try:
                await check()
            except BrokerError as error:
                self._log.warning("queues not checked for expired requests", error=str(error))
            pause = max(MIN_PAUSE, self._interval / CHECKS - (self._clock.monotonic() - began))

    def finish(self) -> None:
        """End after the sweep in progress: RabbitMQ may count a sweep that is broken off as a delivery."""
        self._is_finishing = True
        self._stop_deadlines.set()
        self._stop_listings.set()

    async def check_deadlines(self) -> None:
        """Sweep every queue in which a deadline has passed behind a later one, one after the other."""
        due = [queue_id for queue_id in self.deadlines.due(now_ms=now_ms(self._clock)) if self._may_be_swept(queue_id)]
        for queue_id in due[:MAX_CHECKED]:
            await self._sweep_if_due(queue_id)

    async def check_listing(self) -> None:
        """Sweep every queue that may need it according to a listing, one after the other."""
        # Both before the listing: what the ingress notes meanwhile is newer than the answer and must stay.
        listed_at, known = self._clock.monotonic(), self.deadlines.queues()
        ready = await self._listings.list_ready()
        self.deadlines.forget(known - ready.keys())  # a queue may have been declared since
        self._note_listed(ready, listed_at)
        for queue_id, waiting in ready.items():
            if waiting < 2:
                del self._failures[queue_id]  # requests that arrive now have no counted delivery
            if self._is_due(queue_id, waiting):
                await self._sweep_if_due(queue_id)

    async def _sweep_if_due(self, queue_id: QueueId) -> None:
        """Ask RabbitMQ how many requests wait now, and sweep the queue if it needs it."""
        key, priority = queue_id
        async with self._sweeping:
            # Asked under the lock: `finish` may have been called while this sweep waited for the one before.
            if self._is_finishing:
                return
            self._tracker.hold(key)  # the group must not be unbound meanwhile
            try:
                with self._publish_order.enter(key, priority) as ticket:
                    # Requests that arrive from now on wait until the sweep is over, and then stand behind the copies.
                    ticket.hold_back()
                    async with asyncio.timeout(TAKE_TIMEOUT):
                        # Publishes that were sent before are confirmed, or have failed, when this returns.
                        await ticket.turn()
                    waiting = await self._queue_commands.count_ready(key, priority)  # no publish is unconfirmed now
                    if self._is_due(queue_id, waiting):
                        await self._try_to_sweep(queue_id)
                    else:
                        self.deadlines.settle(queue_id, waiting, now_ms=now_ms(self._clock))
            except TimeoutError:
                self._log.info("queue not swept, a publish is not confirmed yet", key=key, priority=priority)
            finally:
                # Also after an error: a group that stays held would never be unbound.
                self._tracker.release(key)

    def _may_be_swept(self, queue_id: QueueId) -> bool:
        key, priority = queue_id
        used = priority is None or priority in self._layout.used
        return used and self._queue_status[key].is_bound and self._failures[queue_id] < MAX_FAILURES

    def _is_due(self, queue_id: QueueId, waiting: int) -> bool:
        key, priority = queue_id
        hides = self.deadlines.may_hide_expired(queue_id, waiting, now_ms=now_ms(self._clock))
        if not (hides or (waiting and self._may_hold_returned(queue_id))):
            return False
        # All requests would have to fit into memory, and the workers would get none meanwhile.
        if waiting > MAX_TAKEN:
            self._log.warning("queue too long to be swept", key=key, priority=priority, waiting=waiting)
            return False
        return self._may_be_swept(queue_id)

    def _note_listed(self, ready: Mapping[QueueId, int], listed_at: float) -> None:
        """An empty queue counts as swept, and a queue that the previous listing lacked was empty then."""
        self._swept_at = {
            queue_id: self._swept_at.get(queue_id, self._listed_at) if waiting else listed_at - TOTALS_MAX_AGE
            for queue_id, waiting in ready.items()
        }
        self._listed_at = listed_at

    def _may_hold_returned(self, queue_id: QueueId) -> bool:
        """Whether the queue may hold a request that neither the ingress has noted nor the latest sweep has seen."""
        swept_at = self._swept_at.get(queue_id, self._listed_at)
        is_long_ago = self._clock.monotonic() > swept_at + SWEEP_AGAIN * self._interval
        return self._routes.may_have_returned(queue_id, -math.inf if is_long_ago else swept_at)

    async def _try_to_sweep(self, queue_id: QueueId) -> None:
        key, priority = queue_id
        try:
            with self._metrics.cleaning_seconds.time():
                await self._sweep(queue_id)
        except Exception as error:  # or one queue would end this leader's term and each one that follows
            # Each failure may count as a delivery of every request that was taken (broker: count-failures-by-reject).
            self._failures[queue_id] += 1
            self._log.warning(
                "queue not swept",
                key=key,
                priority=priority,
                error=str(error),
                failures=self._failures[queue_id],
                exc_info=not isinstance(error, OsrdyneError),
            )

    async def _sweep(self, queue_id: QueueId) -> None:
        queue, began = self._names.request_queue(*queue_id), self._clock.monotonic()
        # A channel of its own: closing it returns everything that was not acknowledged, in its order.
        channel = await self._session.channel()
        try:
            # Crash from here to the acknowledgement: RabbitMQ returns all of it to the head of the queue, in order.
            deliveries = await self._take(channel, queue)
            limit = self._limit_of(queue_id[0])
            plan = plan_sweep(deliveries, delivery_limit=limit, now_ms=now_ms(self._clock))
            # Crash before: everything returns to the head of the queue. After: it returns too, and the dead letters are
            # answered a second time with the same status.
            await self._dead_letter(plan, queue_id, queue)
            try:
                # Crash before: the originals return. After: the originals return ahead of their marked copies.
                await self._requeue(plan.kept, queue_id)
            except OsrdyneError:
                for taken, _ in plan.dead:  # they are answered, whether or not the others return
                    await taken.delivery.ack()
                raise
            if deliveries:
                # Crash before: originals and copies are in the queue. After: the copies alone. In one step, because
                # RabbitMQ drops acknowledgements that it has not processed when the channel closes.
                await channel.ack(deliveries[-1].tag, multiple=True)
            await channel.ping()  # the acknowledgement has arrived
        finally:
            await channel.close()
        del self._failures[queue_id]
        # The start and not the end: a request that returned during the sweep may stand behind the copies.
        self._swept_at[queue_id] = began
        self.deadlines.replace(queue_id, [taken.deadline_ms for taken in plan.kept])
        self._count(plan, queue_id)

    async def _take(self, channel: Channel, queue: QueueName) -> list[Delivery]:
        """All ready requests, in order; they stay unacknowledged. Raises `QueueNotSweptError`."""
        # Without its priority the workers would get some of the requests, and the copies would stand behind later ones.
        # Not exclusive: workers stay attached, and get the requests that arrive once this consumer is cancelled.
        consumer = await channel.consume(queue, prefetch=PREFETCH, arguments=CONSUME_FIRST)
        # Read while it is checked: the limit of memory must end the sweep before everything has arrived.
        reading = asyncio.ensure_future(_read(consumer))
        cancelling = asyncio.ensure_future(self._cancel_when_empty(channel, consumer))
        try:
            async with asyncio.timeout(TAKE_TIMEOUT):
                await asyncio.wait({reading, cancelling}, return_when=asyncio.FIRST_EXCEPTION)
        except TimeoutError:
            raise QueueNotSweptError(f"The queue did not deliver its requests within {TAKE_TIMEOUT:g} s.") from None
        finally:
            reading.cancel()
            cancelling.cancel()
            await asyncio.wait({reading, cancelling})
        for error in [task.exception() for task in (reading, cancelling) if not task.cancelled()]:
            if error is not None:
                raise error
        return reading.result()

    async def _cancel_when_empty(self, channel: Channel, consumer: Consumer) -> None:
        """Cancel the consumer once no request is ready any more and all that were sent have arrived."""
        # An answer may overtake deliveries; the second answer overtakes none of those before the first (lifecycle:
        # probe). An answer of no consumers, although this one is attached, comes from a queue without a leader.
        in_succession = 0
        while in_succession < 2:
            queue = await channel.declare_queue(consumer.queue, passive=True)
            in_succession = in_succession + 1 if queue.consumers and not queue.ready else 0
            if not in_succession:
                await self._clock.sleep(POLL_INTERVAL)
        # A cancel keeps what was delivered; only new deliveries end.
        await channel.cancel(consumer)

    async def _dead_letter(self, plan: SweepPlan, queue_id: QueueId, queue: QueueName) -> None:
        """Publish expired requests to the dead letter responder, with confirms."""
        letters = [dead_letter_of(taken, reason, queue) for taken, reason in plan.dead]
        await self._publish(letters, exchange=self._names.dead_letter_exchange, queue_id=queue_id)

    async def _requeue(self, kept: Sequence[TakenRequest], queue_id: QueueId) -> None:
        """Publish copies to the exchange and never to the queue (lifecycle: forward-to-exchange), with confirms."""
        now = now_ms(self._clock)
        copies = [copy_of(taken, now_ms=now) for taken in kept]
        await self._publish(copies, exchange=self._names.work_exchange(queue_id[1]), queue_id=queue_id)

    async def _publish(self, messages: Sequence[Message], *, exchange: str, queue_id: QueueId) -> None:
        """Publish in order, with confirms. Raises the first `OsrdyneError` of a batch once all of it was tried."""
        for first in range(0, len(messages), BATCH):
            async with asyncio.TaskGroup() as group:
                attempts = [
                    group.create_task(self._try_to_publish(message, exchange=exchange, queue_id=queue_id))
                    for message in messages[first : first + BATCH]
                ]
            # Not before all of the batch was tried: a request behind a failed one may be in the queue.
            for error in filter(None, (one.result() for one in attempts)):
                raise error

    async def _try_to_publish(self, message: Message, *, exchange: str, queue_id: QueueId) -> OsrdyneError | None:
        try:
            await self._session.publisher.publish(message, exchange=exchange, routing_key=queue_id[0], mandatory=True)
        except OsrdyneError as error:
            return error
        return None

    def _count(self, plan: SweepPlan, queue_id: QueueId) -> None:
        counts = Counter(reason.value for _, reason in plan.dead)
        for outcome, count in (*counts.items(), ("kept", len(plan.kept))):
            self._metrics.cleaned.labels(outcome=outcome).inc(count)
        self._log.info("queue swept", key=queue_id[0], priority=queue_id[1], kept=len(plan.kept), dead=len(plan.dead))


async def _read(consumer: Consumer) -> list[Delivery]:
    """Everything until the consumer ends. Raises `QueueNotSweptError` when it exceeds the memory limit."""
    deliveries: list[Delivery] = []
    size = 0
    async for delivery in consumer:
        deliveries.append(delivery)
        size += len(delivery.body)
        if size > MAX_TAKEN_BYTES:
            raise QueueNotSweptError(f"More than {MAX_TAKEN_BYTES} bytes wait in the queue.")
    return deliveries
