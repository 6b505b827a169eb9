"""How many messages a processor holds at once, so that those that wait for one key do not keep others from coming.

RabbitMQ hands out `PREFETCH` unacknowledged messages. When all of them wait, for a key whose worker is just being
stopped (LIFECYCLE 18), further ones are taken: the processor consumes anew over the same channel, and what it holds
stays with it. Memory is the limit: beyond `MAX_HELD` messages or `MAX_HELD_BYTES` everybody waits. Used by the orphan
processor and the ingress.
"""

from __future__ import annotations

import asyncio

from osrdyne.aio.clock import Clock
from osrdyne.amqp import Channel, Consumer, Delivery
from osrdyne.logs import Logger, get_logger

PREFETCH = 256
PATIENCE = 1.0
"""Seconds in which none of the messages in hand was finished, before more are taken."""
MAX_HELD = 20_000
MAX_HELD_BYTES = 128 * 2**20


class Window:
    """The messages in hand of one consumer."""

    def __init__(self, consumer: Consumer, *, clock: Clock) -> None:
        self._consumer = consumer
        self._clock = clock
        self._channel: Channel | None = None
        self._held: dict[int, int] = {}
        self._bytes = 0
        self._first = 0
        self._room = PREFETCH
        self._finished = 0
        self._full = asyncio.Event()
        self._log: Logger = get_logger("window")

    def take(self, delivery: Delivery) -> None:
        """A message is in hand."""
        self._channel = delivery.channel
        self._held[delivery.tag] = len(delivery.body)
        self._bytes += len(delivery.body)
        self._room -= 1
        if self._room <= 0:
            self._full.set()

    def finish(self, delivery: Delivery) -> None:
        """It was acknowledged, or given back."""
        self._bytes -= self._held.pop(delivery.tag)
        self._finished += 1
        if delivery.tag >= self._first:
            self._room += 1
            self._full.clear()

    async def run(self) -> None:
        """Take more whenever nothing goes on, for ever."""
        while True:
            await self._full.wait()
            finished = self._finished
            await self._clock.sleep(PATIENCE)
            if self._full.is_set() and finished == self._finished and self._may_grow():
                await self._grow()

    def _may_grow(self) -> bool:
        return len(self._held) < MAX_HELD and self._bytes < MAX_HELD_BYTES

    async def _grow(self) -> None:
        assert self._channel is not None
        self._log.info("taking more messages, those in hand wait", queue=self._consumer.queue, held=len(self._held))
        self._first = max(self._held) + 1
        self._room = PREFETCH
        self._full.clear()
        await self._channel.take_more(self._consumer, prefetch=PREFETCH)
