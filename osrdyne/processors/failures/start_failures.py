"""Answers the requests of groups whose workers cannot be started.

While a group has a final start failure and no worker, its queue is consumed here and every request answered
`start-failed` with the worker's last words. The first request after the back-off is put back, and causes the next
attempt. One request at a time per group, so that putting back costs one delivery of one request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from osrdyne.aio.clock import Clock, now_ms
from osrdyne.amqp import Channel, Consumer, Delivery
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.errors import BrokerError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.state.observed import QueueStatuses, StartFailure, WorkerStatuses
from osrdyne.processors.error_boundary import ErrorBoundary, to_dead_letters
from osrdyne.processors.replies import Replier
from osrdyne.protocol.messages import header_text
from osrdyne.protocol.names import Key, QueueName
from osrdyne.protocol.statuses import Status

REATTACH_DELAY = 1.0
MAX_ATTACHED = 500
"""Queues consumed at once: RabbitMQ allows some 2,000 channels for a connection, which others need as well."""
TURN = 5.0
"""How long a group keeps its place when others wait for one, seconds."""


class StartFailureResponder:
    """Consumes the request queues of failed groups."""

    def __init__(
        self,
        *,
        layout: QueueLayout,
        board: WorkerStatuses,
        queues: QueueStatuses,
        replier: Replier,
        open_channel: Callable[[], Awaitable[Channel]],
        retry: Callable[[Key], None],
        clock: Clock,
    ) -> None:
        self._layout = layout
        self._board = board
        self._queues = queues
        self._replier = replier
        self._open_channel = open_channel
        self._retry = retry
        self._clock = clock
        self._serving: set[Key] = set()
        self._consumers: dict[Key, list[tuple[Channel, Consumer]]] = {}
        self._room = asyncio.Semaphore(MAX_ATTACHED)
        self._waiting_for_room = 0
        self._log: Logger = get_logger("start_failures")

    async def run(self) -> None:
        """Attach to and detach from queues as groups fail and recover, for ever."""
        changes = self._board.feed.subscribe(already=self._board.keys())
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_classes(), name="classes of failed groups")
            while True:
                for key in await changes.wait():
                    if not self._is_failed(key):
                        await self._detach(key)
                    elif key not in self._serving:
                        self._serving.add(key)
                        group.create_task(self._serve(key), name=f"start failures of {key!r}")

    def _is_failed(self, key: Key) -> bool:
        facts = self._board[key]
        return facts.failure is not None and facts.is_empty and self._queues[key].exists

    def _queues_of(self, key: Key) -> list[QueueName]:
        """The queues that the group has; of a class that has just come into use it may have none yet."""
        return [queue.name for queue in self._layout.queues(key) if not self._layout.is_new(key, queue.priority)]

    async def _follow_classes(self) -> None:
        """Attach anew where a group has got a queue for a further class."""
        changes = self._queues.feed.subscribe()
        while True:
            for key in await changes.wait():
                attached = self._consumers.get(key)
                if attached and [consumer.queue for _, consumer in attached] != self._queues_of(key):
                    await self._detach(key)

    async def _detach(self, key: Key) -> None:
        """Take no further request; the one that is being answered is answered to its end."""
        for channel, consumer in self._consumers.pop(key, []):
            with suppress(BrokerError):
                await channel.cancel(consumer)

    async def _serve(self, key: Key) -> None:
        """Answer the group's requests until it recovers, or a request comes that may cause the next attempt."""
        while self._is_failed(key):
            await self._take_place()
            turn = asyncio.ensure_future(self._end_turn(key))
            try:
                if await self._answer_until_demand(key):
                    self._retry(key)
            except BrokerError as error:
                self._log.debug("queue of a failed group cannot be read", key=key, error=str(error))
            finally:
                turn.cancel()
                self._room.release()
            await self._clock.sleep(REATTACH_DELAY)
        self._serving.discard(key)

    async def _take_place(self) -> None:
        """First come, first served."""
        self._waiting_for_room += 1
        try:
            await self._room.acquire()
        finally:
            self._waiting_for_room -= 1

    async def _end_turn(self, key: Key) -> None:
        """Make room for others that wait for it, so that every failed group is looked at."""
        while not self._waiting_for_room:
            await self._clock.sleep(TURN)
        await self._clock.sleep(TURN)
        await self._detach(key)

    async def _answer_until_demand(self, key: Key) -> bool:
        """Answer requests. True when one came after the back-off: it is put back, for the worker to be started."""
        channel = await self._open_channel()
        try:
            queues = self._queues_of(key)
            consumers = [await channel.consume(queue, prefetch=1) for queue in queues]
            self._consumers[key] = [(channel, consumer) for consumer in consumers]
            if not self._is_failed(key) or queues != self._queues_of(key):
                return False
            return any(await asyncio.gather(*(self._answer_from(consumer, key) for consumer in consumers)))
        finally:
            self._consumers.pop(key, None)
            await channel.close()

    async def _answer_from(self, consumer: Consumer, key: Key) -> bool:
        """Answer what one queue of the group holds; True on demand, and then no queue of it is read any further."""
        async for delivery in consumer:
            failure = self._board[key].failure
            if failure is None or self._clock.monotonic() >= failure.retry_at:
                await self._detach(key)
                return True
            with ErrorBoundary(delivery, self._log) as boundary:
                await self._answer(key, failure, delivery)
            if boundary.failed:
                await to_dead_letters(delivery)
        return False

    async def _answer(self, key: Key, failure: StartFailure, delivery: Delivery) -> None:
        request = delivery.to_request(now_ms=now_ms(self._clock), key=key)
        await self._replier.answer(
            request,
            Status.START_FAILED,
            describe_failure(failure),
            retry_after=max(0.0, round(failure.retry_at - self._clock.monotonic(), 1)),
            facts={"log_lines": [header_text(line) for line in failure.log_lines], "attempts": failure.attempts},
        )
        await delivery.ack()
        self._log.info("request answered, its group cannot start", key=key)


def describe_failure(failure: StartFailure) -> str:
    """The reason and the worker's last line, unless that only repeats what the worker gave as the reason.

    That no worker could be started is what the status says already.
    """
    reason = failure.reason.rstrip(".")
    last = failure.log_lines[-1] if failure.log_lines else ""
    words = "" if not last or reason.rpartition(": ")[2] in last else f" Last words: {last}"
    return f"{reason[:1].upper()}{reason[1:]}.{words}"
