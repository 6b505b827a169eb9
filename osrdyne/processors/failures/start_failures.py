"""The start failure responder: answers the requests of groups whose workers cannot be started.

While a group has a final start failure and no worker, the responder consumes its queues and answers every request
`start-failed` with the last log line of the worker. The first request after the back-off is requeued and causes another
attempt. One request at a time per queue, so that requeueing costs one delivery of one request.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from functools import partial

from osrdyne.aio.clock import now_ms
from osrdyne.amqp import Channel, Consumer, Delivery
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.errors import BrokerError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.routing.circuits import ActiveCircuits
from osrdyne.pool.state.observed import QueueStatuses, StartFailure, WorkerStatuses
from osrdyne.pool.workers.loop import WorkerGroupsLoop
from osrdyne.processors.consumers import ErrorBoundary
from osrdyne.processors.failures.group_consumers import GroupConsumers
from osrdyne.processors.replies import Replier, SetAside
from osrdyne.protocol.messages import ROUTE_HEADER, header_text
from osrdyne.protocol.names import Key
from osrdyne.protocol.statuses import Status, decode_text

REATTACH_DELAY = 1.0
# Groups whose queues are consumed at once: other components need channels of the connection's 2,000, too.
MAX_ATTACHED = 500
TURN = 5.0  # Seconds that a group keeps its slot when others wait for one.


class StartFailureResponder:
    """Consumes the request queues of failed groups."""

    def __init__(
        self,
        context: TermContext,
        *,
        layout: QueueLayout,
        worker_status: WorkerStatuses,
        queue_status: QueueStatuses,
        replier: Replier,
        open_channel: Callable[[], Awaitable[Channel]],
        circuits: ActiveCircuits,
        worker_loop: WorkerGroupsLoop,
        is_removed: Callable[[Key], bool] = lambda key: False,
    ) -> None:
        """`is_removed`: whether the queue of a key is being removed."""
        self._is_removed = is_removed
        self._clock = context.clock
        # One request at a time: those behind it stay in the queue, and a requeue counts a single delivery.
        self._consumers = GroupConsumers(layout, open_channel, prefetch=1)
        self._worker_status = worker_status
        self._queue_status = queue_status
        self._replier = replier
        self._circuits = circuits
        self._worker_loop = worker_loop
        self._serving: set[Key] = set()
        self._slots = asyncio.Semaphore(MAX_ATTACHED)
        self._waiting_for_slot = 0
        self._log: Logger = get_logger("start_failures", pool=context.names.pool)

    async def run(self) -> None:
        """Attach to and detach from queues as groups fail and recover; never returns."""
        # Groups that failed before this subscription are in it too: a change is never reported again.
        changes = self._worker_status.feed.subscribe(already=self._worker_status.keys())
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_priorities(), name="priorities of failed groups")
            while True:
                for key in await changes.wait():
                    if not self._is_failed(key):
                        await self._consumers.detach(key)
                    elif key not in self._serving:
                        # Added before the task begins: two changes in a row must not consume the same queues twice.
                        self._serving.add(key)
                        group.create_task(self._serve(key, group), name=f"start failures of {key!r}")

    def _is_failed(self, key: Key) -> bool:
        if self._is_removed(key):
            return False  # its requests are answered `gone`
        status = self._worker_status[key]
        # A worker that still runs consumes the queues: the responder would answer requests that the worker could serve.
        return status.failure is not None and status.is_empty and self._queue_status[key].exists

    async def _follow_priorities(self) -> None:
        """Attach again when a group gets a queue for another priority level."""
        changes = self._queue_status.feed.subscribe()
        while True:
            for key in await changes.wait():
                if self._consumers.lacks_queue(key):
                    await self._consumers.detach(key)

    async def _serve(self, key: Key, group: asyncio.TaskGroup) -> None:
        """Answer the group's requests until it recovers, or until a request may cause the next attempt."""
        while self._is_failed(key):
            # Before the channel is opened: with thousands of failed groups the connection would run out of channels.
            await self._take_slot()
            try:
                if await self._answer_until_demand(key, group):
                    # The request that caused it is back in its queue for the new worker.
                    self._worker_loop.retry(key)
            except BrokerError as error:
                self._log.debug("queue of a failed group not readable", key=key, error=str(error))
            finally:
                self._slots.release()
            # Time for the worker groups loop to begin the next attempt, and a limit to how often a queue that cannot be
            # read is tried.
            await self._clock.sleep(REATTACH_DELAY)
        # No await since the last check: a failure that comes now finds the key free and serves it anew.
        self._serving.discard(key)

    async def _take_slot(self) -> None:
        """Wait for a slot, in the order of arrival."""
        self._waiting_for_slot += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting_for_slot -= 1

    async def _end_turn(self, key: Key) -> None:
        """Detach after `TURN` seconds if another group waits for the slot, so that every failed group gets one."""
        while not self._waiting_for_slot:
            await self._clock.sleep(TURN)
        await self._clock.sleep(TURN)
        await self._consumers.detach(key)

    async def _answer_until_demand(self, key: Key, group: asyncio.TaskGroup) -> bool:
        """Answer requests. True when one arrives after the back-off: it returns to its queue for the worker to be
        started."""
        async with self._consumers.attach(key, group) as consumers:
            # The group may have recovered, or got a queue, while it was attached.
            if not self._is_failed(key) or self._consumers.lacks_queue(key):
                return False
            # Not before: the turn ends by a detach, which does nothing while RabbitMQ still has to open the channel.
            turn = asyncio.ensure_future(self._end_turn(key))
            try:
                return any(await asyncio.gather(*(self._answer_from(consumer, key) for consumer in consumers)))
            finally:
                turn.cancel()

    async def _answer_from(self, consumer: Consumer, key: Key) -> bool:
        """Answer the requests of one queue; True on demand, and then no queue of the group is read any further."""
        is_demanded = False
        async for delivery in consumer:
            failure = self._worker_status[key].failure
            if failure is None or self._clock.monotonic() >= failure.retry_at:
                await self._consumers.detach(key)
                # Returned here and not by a close: the channel stays open while answers of the group wait.
                await delivery.nack()
                is_demanded = True
            else:
                await self._consumers.answer(key, consumer, delivery, partial(self._answer, key, failure, delivery))
        return is_demanded

    async def _answer(self, key: Key, failure: StartFailure, delivery: Delivery, set_aside: SetAside) -> None:
        request = delivery.to_request(now_ms=now_ms(self._clock), key=key)
        status, detail, code = Status.START_FAILED, describe_failure(failure), None
        facts: dict[str, object] = {
            "log_lines": [header_text(line) for line in failure.log_lines],
            "attempts": failure.attempts,
        }
        if (refusal := failure.refusal) is not None:
            # As a handler would answer it: a 404 of `on_start` is a 404 for the caller.
            status, detail, code = Status.ERROR, refusal.message, refusal.code
            details = {name: value for name, value in refusal.details.items() if name not in {"message", "path"}}
            facts = {**details, "code": refusal.error_code}
        # Crash before: the request returns to its queue. After: it returns and is answered a second time.
        await self._replier.answer(
            request,
            status,
            detail,
            code=code,
            retry_after=max(0.0, math.ceil((failure.retry_at - self._clock.monotonic()) * 10) / 10),
            facts=facts,
            set_aside=set_aside,
        )
        await delivery.ack()
        # A boundary of its own: the request is acknowledged, and an error here must not reject it as well.
        with ErrorBoundary(delivery, self._log):
            if self._circuits.counts:
                route = decode_text(delivery.headers.get(ROUTE_HEADER)) or None
                self._circuits.record(route, key, [delivery.fingerprint()], status=status, code=code)
        self._log.info("request of a failed group answered", key=key, status=str(status), code=code)


def describe_failure(failure: StartFailure) -> str:
    """The reason and the last log line of the worker, unless the reason already contains it."""
    reason = failure.reason.rstrip(".")
    last = failure.log_lines[-1] if failure.log_lines else ""
    shown = "" if not last or reason.rpartition(": ")[2] in last else f" Last log line: {last}"
    return f"{reason[:1].upper()}{reason[1:]}.{shown}"
