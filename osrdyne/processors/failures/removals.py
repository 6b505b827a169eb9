"""The removal responder: answers `gone` to the requests that wait in a queue that is being removed.

From the moment when a removal is stored until the group has ended, the responder consumes the queues of the group,
ahead of its workers, and answers each request. A worker finishes the requests that it runs; the responder answers those
that it returns. Steps: answer with confirm, acknowledge. A crash in between returns the request, and the next leader
answers it again with the same status. Source: docs/reference/created-queues.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from osrdyne.aio.clock import now_ms
from osrdyne.aio.signals import Subscription
from osrdyne.amqp import Channel, Consumer, Delivery
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.errors import BrokerError
from osrdyne.ingress.policies.lifetimes import removal_detail
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.state.groups.tracker import PoolStateTracker
from osrdyne.pool.state.observed import QueueStatuses
from osrdyne.pool.state.queues.created_queues import CreatedQueues
from osrdyne.processors.failures.group_consumers import GroupConsumers
from osrdyne.processors.replies import Replier, SetAside
from osrdyne.protocol.names import Key
from osrdyne.protocol.statuses import Status

REATTACH_DELAY = 1.0
PREFETCH = 50
CONSUME_FIRST = {"x-priority": 1000}
# Groups whose queues are consumed at once: other components need channels of the connection's 2,000, too.
MAX_ATTACHED = 100


class RemovalResponder:
    """Consumes the queues of groups that are being removed."""

    def __init__(
        self,
        context: TermContext,
        *,
        created: CreatedQueues,
        tracker: PoolStateTracker,
        layout: QueueLayout,
        queue_status: QueueStatuses,
        replier: Replier,
        open_channel: Callable[[], Awaitable[Channel]],
    ) -> None:
        self._clock, self._metrics = context.clock, context.metrics
        self._created = created
        self._tracker = tracker
        # Ahead of the workers, which may have consumers until they are drained.
        self._consumers = GroupConsumers(layout, open_channel, prefetch=PREFETCH, arguments=CONSUME_FIRST)
        self._queue_status = queue_status
        self._replier = replier
        self._serving: set[Key] = set()
        self._slots = asyncio.Semaphore(MAX_ATTACHED)
        self._log: Logger = get_logger("removals", pool=context.names.pool)

    async def run(self) -> None:
        """Attach to queues whose removal begins, and detach when their group ends. Never returns."""
        async with asyncio.TaskGroup() as group:
            for source in (
                self._created.policy_changes.subscribe(already=[record.key for record in self._created.all()]),
                self._queue_status.feed.subscribe(),
                self._tracker.subscribe(),
            ):
                group.create_task(self._follow(source, group), name="queues that are being removed")

    async def _follow(self, source: Subscription[Key], group: asyncio.TaskGroup) -> None:
        while True:
            for key in await source.wait():
                if not self._is_due(key) or self._consumers.lacks_queue(key):
                    await self._consumers.detach(key)
                if self._is_due(key) and key not in self._serving:
                    # Added before the task begins: two changes in a row must not consume the same queues twice.
                    self._serving.add(key)
                    group.create_task(self._serve(key, group), name=f"removal of {key!r}")

    def _is_due(self, key: Key) -> bool:
        """Whether requests may wait in queues of the group. Once the group has ended, its queues are proven empty: a
        consumer would prevent that."""
        is_up = self._tracker.status(key) is not None
        return self._created.is_ending(key) and is_up and self._queue_status[key].exists

    async def _serve(self, key: Key, group: asyncio.TaskGroup) -> None:
        while self._is_due(key):
            async with self._slots:
                try:
                    await self._answer_all(key, group)
                except BrokerError as error:
                    self._log.debug("queue that is being removed not readable", key=key, error=str(error))
            # Time for the state to change, and a limit to how often a queue that cannot be read is tried.
            await self._clock.sleep(REATTACH_DELAY)
        # No await since the last check: a change that comes now finds the key free and serves it anew.
        self._serving.discard(key)

    async def _answer_all(self, key: Key, group: asyncio.TaskGroup) -> None:
        """Answer requests until the group has ended."""
        async with self._consumers.attach(key, group) as consumers:
            # The group may have ended, or got a queue, while it was attached.
            if not self._is_due(key) or self._consumers.lacks_queue(key):
                await self._consumers.detach(key)
            await asyncio.gather(*(self._answer_from(consumer, key) for consumer in consumers))

    async def _answer_from(self, consumer: Consumer, key: Key) -> None:
        async for delivery in consumer:
            await self._consumers.answer(key, consumer, delivery, partial(self._answer, key, delivery))

    async def _answer(self, key: Key, delivery: Delivery, set_aside: SetAside) -> None:
        request = delivery.to_request(now_ms=now_ms(self._clock), key=key)
        record = self._created.get(key)
        # Crash before: the request returns to its queue. After: it returns and is answered a second time.
        reason = removal_detail(None if record is None else record.reason)
        await self._replier.answer(request, Status.GONE, reason, set_aside=set_aside)
        await delivery.ack()
        self._metrics.gone.inc()
        self._log.info("request answered gone", key=key)
