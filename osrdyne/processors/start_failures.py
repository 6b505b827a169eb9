"""Answers the requests of groups whose workers cannot be started.

While a group has a final start failure and no worker, its queue is consumed here and every request answered
`start-failed` with the worker's last words. The first request after the back-off is put back, and causes the next
attempt. One request at a time per group, so that putting back costs one delivery of one request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from osrdyne.aio.clock import Clock, now_ms
from osrdyne.amqp import Channel, Delivery
from osrdyne.errors import BrokerUnavailableError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.facts import QueueBoard, StartFailure, WorkerBoard
from osrdyne.processors.replies import Replier
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.statuses import Status

REATTACH_DELAY = 1.0


class StartFailureResponder:
    """Consumes the request queues of failed groups."""

    def __init__(
        self,
        *,
        names: PoolNames,
        board: WorkerBoard,
        queues: QueueBoard,
        replier: Replier,
        open_channel: Callable[[], Awaitable[Channel]],
        retry: Callable[[Key], None],
        clock: Clock,
    ) -> None:
        self._names = names
        self._board = board
        self._queues = queues
        self._replier = replier
        self._open_channel = open_channel
        self._retry = retry
        self._clock = clock
        self._attached: dict[Key, asyncio.Task[None]] = {}
        self._log: Logger = get_logger("start_failures")

    async def run(self) -> None:
        """Attach to and detach from queues as groups fail and recover, for ever."""
        changes = self._board.feed.subscribe(already=self._board.keys())
        async with asyncio.TaskGroup() as group:
            while True:
                for key in await changes.wait():
                    if self._is_failed(key) and key not in self._attached:
                        task = group.create_task(self._serve(key), name=f"start failures of {key!r}")
                        self._attached[key] = task
                        task.add_done_callback(lambda _, key=key: self._attached.pop(key, None))  # type: ignore[misc]
                    elif not self._is_failed(key) and key in self._attached:
                        self._attached[key].cancel()

    def _is_failed(self, key: Key) -> bool:
        facts = self._board[key]
        return facts.failure is not None and facts.is_empty and self._queues[key].exists

    async def _serve(self, key: Key) -> None:
        """Answer the group's requests until it recovers, or a request comes that may cause the next attempt."""
        while self._is_failed(key):
            channel = await self._open_channel()
            try:
                consumer = await channel.consume(self._names.request_queue(key), prefetch=1)
                async for delivery in consumer:
                    failure = self._board[key].failure
                    if failure is None or self._clock.monotonic() >= failure.retry_at:
                        break
                    await self._answer(key, delivery, failure)
            except BrokerUnavailableError as error:
                self._log.debug("queue of a failed group is gone", key=key, error=str(error))
            finally:
                await channel.close()
            self._retry(key)
            await self._clock.sleep(REATTACH_DELAY)

    async def _answer(self, key: Key, delivery: Delivery, failure: StartFailure) -> None:
        request = delivery.to_request(now_ms=now_ms(self._clock), key=key)
        last = f" Last words: {failure.log_lines[-1]}" if failure.log_lines else ""
        await self._replier.answer(
            request,
            Status.START_FAILED,
            f"No worker could be started for this key: {failure.reason}.{last}",
            retry_after=max(0.0, round(failure.retry_at - self._clock.monotonic(), 1)),
            facts={"log_lines": list(failure.log_lines), "attempts": failure.attempts},
        )
        await delivery.ack()
        self._log.info("request answered, its group cannot start", key=key)
