"""Admission to a queue of limited length: waits for room, and makes room by answering the oldest request.

The length is the number of ready messages in RabbitMQ while no publish of the ingress to that queue is under way. After
a count, the ingress admits as many requests as have room, and counts again. Requests that a worker has taken, or that
wait for another attempt, do not count until they are in the queue again.

A request that waits for room is not acknowledged: if the leader dies, it returns to its place in the orphan queue.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

from osrdyne.aio.clock import now_ms
from osrdyne.amqp import Channel, Delivery
from osrdyne.errors import BrokerError
from osrdyne.ingress.acceptance import RoutedRequest
from osrdyne.ingress.checks import Refusal
from osrdyne.ingress.policies.lengths import Step, limits_length, next_step, overflow_refusal
from osrdyne.ingress.policies.lifetimes import refuse_removed
from osrdyne.ingress.policies.table import FoundPolicy
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import RequestQueues, TermContext
from osrdyne.pool.routing.policies import ActivePolicies
from osrdyne.pool.state.queues.created_queues import CreatedQueues
from osrdyne.processors.publish_order import PublishOrder
from osrdyne.processors.replies import Replier, SetAside, until_set_aside
from osrdyne.processors.requests.waiting import NO_ROOM_IN_TIME, WaitingRequest, WaitingRequests
from osrdyne.protocol.deadlines import is_past
from osrdyne.protocol.names import Key
from osrdyne.protocol.statuses import Status

COUNT_INTERVAL = 0.1  # Seconds between two counts of one full queue.
COUNT_SHARE = 0.02  # Seconds by which each further full queue prolongs that: about 50 counts a second in all.
COUNT_TIMEOUT = 5.0  # Seconds for the publishes under way to be confirmed.
MAX_WAITING = 10_000  # Requests that wait for room; with more, each full queue overflows at once.
MAX_WAITING_BYTES = 128 * 2**20  # The same for their bodies: a quarter of what the ingress may hold in memory.
MAX_ROOMS = 10_000  # Queues whose room is remembered; then all are counted again.
MAX_EVICTING = 20  # Requests taken out at once, each on its own channel, besides those whose answers wait.

# The leader's term ends in order: the request is not answered, and returns to its place in the orphan queue.
RETURNED = Refusal(Status.REJECTED, "The leader has ended.")


@dataclass(slots=True)
class _Room:
    """How many requests a queue may still take since its latest count, at `counted_at` (monotonic), and whether it
    has admitted any since then."""

    limit: int = 0
    left: int = 0
    admitted: bool = False
    counted_at: float = -math.inf
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class QueueLengths:
    """The limited queues of one term. `open_channel`: for taking out the oldest requests."""

    def __init__(
        self,
        context: TermContext,
        *,
        policies: ActivePolicies,
        created: CreatedQueues,
        queues: RequestQueues,
        publish_order: PublishOrder,
        replier: Replier,
        waiting: WaitingRequests,
        open_channel: Callable[[], Awaitable[Channel]],
    ) -> None:
        self.waiting = waiting
        self._clock, self._metrics = context.clock, context.metrics
        self._policies = policies
        self._created = created
        self._layout, self._queue_status, self._queue_commands = queues.layout, queues.status, queues.commands
        self._publish_order = publish_order
        self._replier = replier
        self._open_channel = open_channel
        self._channels: list[Channel] = []  # that no eviction uses now
        self._evicting = asyncio.Semaphore(MAX_EVICTING)
        self._rooms: dict[Key, _Room] = {}
        self._full = 0
        self._is_finishing = False
        self._log: Logger = get_logger("queue_lengths", pool=context.names.pool)

    def limits(self, key: Key) -> bool:
        """Whether the queue of this key has a limited length."""
        return limits_length(self._policies.of(key))

    def finish(self) -> None:
        """End the waits for room, because the leader's term ends in order: the requests return to the orphan queue."""
        self._is_finishing = True
        self.waiting.wake_all()

    def admit_at_once(self, routed: RoutedRequest) -> bool:
        """Admit a request if its queue is known to have room; the caller draws its ticket without a wait in between, or
        the next count would miss it. False: nothing is decided, use `admit`."""
        found, room = self._policies.of(routed.key), self._rooms.get(routed.key)
        # While the lock is held, the queue is being counted.
        if found is None or room is None or room.left <= 0 or room.lock.locked():
            return False
        if self._is_finishing or room.limit != found.policy.max_queue_length or self._created.is_ending(routed.key):
            return False
        room.left -= 1
        room.admitted = True
        return True

    async def admit(self, waiting: WaitingRequest, *, tasks: asyncio.TaskGroup) -> Refusal | None:
        """Wait until the queue has room for the request. Returns the refusal if it gets none or its wait has ended, and
        `RETURNED` after `finish`. Not called concurrently for one key. `tasks`: gets those of the answers to requests
        that are taken out."""
        is_full, routed = False, waiting.routed[0]
        try:
            # After `finish` none is admitted, even with room: it would overtake those that return.
            while not self._is_finishing:
                if waiting.refusal is not None:
                    return waiting.refusal
                # The queue may be deleted, or expire, while requests wait for room in it.
                if (removed := refuse_removed(self._created.get(routed.key))) is not None:
                    return removed
                found = self._policies.of(routed.key)
                if found is None or not limits_length(found):
                    return None
                limit = found.policy.max_queue_length
                has_room = await self._take_room(routed.key, limit)
                if not has_room and is_past(routed.deadline.at_ms, now_ms=now_ms(self._clock)):
                    return NO_ROOM_IN_TIME
                waited = self._clock.monotonic() - waiting.orphan.at
                is_crowded = len(self.waiting) > MAX_WAITING or self.waiting.body_bytes > MAX_WAITING_BYTES
                step = next_step(found, has_room=bool(has_room), waited=waited, is_crowded=is_crowded)
                if step is Step.ADMIT:
                    return None
                if step in (Step.REJECT, Step.DISCARD):
                    return overflow_refusal(found, step)
                # Counted anew, with no publish under way: otherwise one request too many could be taken out, or a more
                # urgent one than needed.
                if step is Step.EVICT and has_room is not None:
                    has_room = await self._take_room(routed.key, limit, count_anew=True)
                    if has_room:
                        return None
                    # Never while the length is not known: the queue may have room.
                    if has_room is not None and await self._evict(routed.key, found, tasks):
                        continue
                if not is_full:
                    is_full, self._full = True, self._full + 1
                left = found.policy.enqueue_timeout - waited if step is Step.WAIT else math.inf
                await waiting.pause.wait(min(left, COUNT_INTERVAL + COUNT_SHARE * self._full))
            return RETURNED
        finally:
            self._full -= is_full

    async def admit_copy(self, routed: RoutedRequest) -> bool:
        """Whether the queue has room for a one-way copy, which does not wait for it."""
        found = self._policies.of(routed.key)
        if found is None or not limits_length(found):
            return True
        return bool(await self._take_room(routed.key, found.policy.max_queue_length))

    async def _take_room(self, key: Key, limit: int, *, count_anew: bool = False) -> bool | None:
        """Take room for one request; None if the length cannot be known now. Counts the queue if there was no room, at
        most once in `COUNT_INTERVAL`; with `count_anew` also if it admitted a request since the latest count."""
        if len(self._rooms) > MAX_ROOMS:
            self._rooms.clear()
        room = self._rooms.setdefault(key, _Room())
        async with room.lock:
            if room.limit != limit:
                room.limit, room.left, room.counted_at = limit, 0, -math.inf
            due = self._clock.monotonic() - room.counted_at >= COUNT_INTERVAL
            if room.left <= 0 and (due or (count_anew and room.admitted)):
                ready = await self._count(key)
                if ready is None:
                    return None
                room.left, room.counted_at, room.admitted = limit - ready, self._clock.monotonic(), False
            if room.left <= 0:
                return False
            # Taken before the publish: a publish that fails leaves room unused until the next count.
            room.left -= 1
            room.admitted = True
            return True

    async def _count(self, key: Key) -> int | None:
        """The requests that are ready in all queues of the group; None if that cannot be known now."""
        if not self._queue_status[key].exists:
            return 0
        queues = self._layout.queues(key)
        try:
            with ExitStack() as stack:
                tickets = [stack.enter_context(self._publish_order.enter(key, queue.priority)) for queue in queues]
                async with asyncio.timeout(COUNT_TIMEOUT):
                    for ticket in tickets:
                        # Publishes that were sent before are confirmed when this returns, and an expiry sweep, which
                        # takes everything out for a while, is over.
                        ticket.hold_back()
                        await ticket.turn()
                    return sum([await self._queue_commands.count_ready(key, queue.priority) for queue in queues])
        except (TimeoutError, BrokerError) as error:
            self._log.warning("length of a queue not known", key=key, error=str(error))
            return None

    async def _evict(self, key: Key, found: FoundPolicy, tasks: asyncio.TaskGroup) -> bool:
        """Take out the oldest request of the least urgent level and answer it; False if none was ready. Returns earlier
        if its answer waits for its reply queue."""
        room = self._rooms.setdefault(key, _Room())
        is_taken = False

        async def take_out(set_aside: SetAside) -> None:
            nonlocal is_taken
            async with self._channel() as channel:
                # Not while the queue is being counted: a count that included this room would give it twice.
                async with room.lock:
                    delivery = await self._take_oldest(channel, key)
                    if delivery is None:
                        # Workers have taken what was counted: count again at once.
                        room.counted_at = -math.inf
                        return
                    room.left += 1
                is_taken = True
                # Crash before: the request returns to the head of its queue. After: it returns too, and is answered a
                # second time, or run.
                await self._replier.answer(
                    delivery.to_request(now_ms=now_ms(self._clock), key=key),
                    Status.MAXLEN,
                    f"A later request took the place of this one: the {found.name} allows "
                    f"{found.policy.max_queue_length} waiting requests (MaxQueueLength) and discards the oldest "
                    "(Overflow).",
                    set_aside=set_aside,
                )
                # Crash before: as above. After: it is gone, answered, and the request that waits returns to the
                # ingress.
                await delivery.ack()
                self._metrics.evicted.inc()

        def forget_room(error: BrokerError) -> None:
            # The request may be in its queue again.
            room.left, room.counted_at = 0, -math.inf
            self._log.warning("oldest request not taken out", key=key, error=str(error))

        try:
            async with self._evicting:
                await until_set_aside(tasks, take_out, name=f"eviction from {key!r}", on_late_error=forget_room)
        except BrokerError as error:
            forget_room(error)
            return False
        return is_taken

    @asynccontextmanager
    async def _channel(self) -> AsyncIterator[Channel]:
        """A channel that no other eviction uses: an error closes it, and returns all requests taken through it."""
        self._channels = [channel for channel in self._channels if not channel.is_closed]
        channel = self._channels.pop() if self._channels else await self._open_channel()
        try:
            yield channel
        except BaseException:
            # Closing the channel returns the request that was taken and not acknowledged.
            with suppress(BrokerError):
                await channel.close()
            raise
        self._channels.append(channel)

    async def _take_oldest(self, channel: Channel, key: Key) -> Delivery | None:
        # The default level is the least urgent, and the last: a more urgent request stays while it has any.
        for queue in reversed(self._layout.existing(key)):
            delivery = await channel.get(queue.name)
            if delivery is not None:
                return delivery
        return None
