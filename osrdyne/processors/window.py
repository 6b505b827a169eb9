"""How many messages a processor holds at once: no more than fit into memory, and no fewer than keep it busy.

RabbitMQ hands out a number of unacknowledged messages, whatever their size. So the processor begins with `FIRST`, and
consumes anew over the same channel for as many as `MAX_HELD_BYTES` allows by the largest message that it holds,
`PREFETCH` at most; what it holds stays with it. A message that is too large for the present number makes it smaller.

When all messages wait, for a key whose worker is just being stopped (LIFECYCLE 18), further ones are taken, up to
`MAX_HELD` messages or `MAX_HELD_BYTES`. Used by the orphan processor, the ingress and the dead letter responder.
"""

from __future__ import annotations

import asyncio

from osrdyne.aio.clock import Clock
from osrdyne.amqp import Channel, Consumer, Delivery
from osrdyne.logs import Logger, get_logger

FIRST = 8
"""Messages that are taken before anything is known of their size."""
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
        self._last = 0
        self._largest = 0
        self._prefetch = FIRST
        self._room = FIRST
        self._finished = 0
        self._full = asyncio.Event()
        self._log: Logger = get_logger("window")

    def take(self, delivery: Delivery) -> None:
        """A message is in hand."""
        size = len(delivery.body)
        self._channel = delivery.channel
        self._held[delivery.tag] = size
        self._last = delivery.tag
        self._bytes += size
        self._largest = max(self._largest, size)
        self._room -= 1
        if self._room <= 0 or self._is_too_wide():
            self._full.set()

    def finish(self, delivery: Delivery) -> None:
        """It was acknowledged, or given back."""
        self._bytes -= self._held.pop(delivery.tag)
        self._finished += 1
        if delivery.tag >= self._first:
            self._room += 1
            self._full.clear()

    async def run(self) -> None:
        """Take more, or fewer, for as long as the consumer lasts."""
        while True:
            await self._full.wait()
            if self._is_too_wide() or self._prefetch < self._allowed():
                await self._take_up_to(self._allowed())
                continue
            finished = self._finished
            await self._clock.sleep(PATIENCE)
            if self._full.is_set() and finished == self._finished and self._may_grow():
                self._log.info(
                    "taking more messages, those in hand wait", queue=self._consumer.queue, held=len(self._held)
                )
                await self._take_up_to(self._allowed())

    def _may_grow(self) -> bool:
        return len(self._held) < MAX_HELD and self._bytes < MAX_HELD_BYTES

    def _allowed(self) -> int:
        """How many more there is room for, should each be as large as the largest one."""
        return max(1, min(PREFETCH, (MAX_HELD_BYTES - self._bytes) // max(1, self._largest)))

    def _is_too_wide(self) -> bool:
        return self._prefetch > max(1, MAX_HELD_BYTES // max(1, self._largest))

    async def _take_up_to(self, number: int) -> None:
        """Consume anew, with `number` messages on top of those in hand."""
        assert self._channel is not None
        self._first = self._last + 1
        self._prefetch = self._room = number
        self._largest = max(self._held.values(), default=0)
        self._full.clear()
        await self._channel.take_more(self._consumer, prefetch=number)
