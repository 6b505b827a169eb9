"""How many messages a processor holds at once: no more than fit into memory, and no fewer than keep it busy.

A prefetch counts messages, whatever their size. So RabbitMQ is given room for as many messages as fit into
`MAX_HELD_BYTES`, should each be as large as `requests.max_message_bytes` allows. When all of them are in hand their
size is known. If they were small, the processor consumes anew over the same channel, for as many as fit into the rest;
what it holds stays with it. So small messages before large ones change nothing.

It takes up to `PREFETCH` messages in this way. When all of these wait, for a key whose worker is just being stopped,
further ones are taken, up to `MAX_HELD` messages. Used by the orphan processor, the ingress and the dead letter
responder.
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
MAX_HELD_BYTES = 512 * 2**20


def first_prefetch(max_message_bytes: int) -> int:
    """How many messages a consumer begins with: as many as fit if each is as large as it may be."""
    return max(1, min(PREFETCH, MAX_HELD_BYTES // max_message_bytes))


class Window:
    """The messages in hand of one consumer, which was opened with `first_prefetch`."""

    def __init__(self, consumer: Consumer, *, max_message_bytes: int, clock: Clock) -> None:
        self._consumer = consumer
        self._max_message_bytes = max_message_bytes
        self._clock = clock
        self._channel: Channel | None = None
        self._held: dict[int, int] = {}
        self._bytes = 0
        self._first = 0
        self._last = 0
        self._largest = max_message_bytes  # RabbitMQ may let larger ones pass: its own limit counts there
        self._prefetch = self._room = first_prefetch(max_message_bytes)
        self._target = PREFETCH
        self._finished = 0
        self._changed = asyncio.Event()
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
            self._changed.set()

    def finish(self, delivery: Delivery) -> None:
        """It was acknowledged, or given back."""
        self._bytes -= self._held.pop(delivery.tag)
        self._finished += 1
        if delivery.tag >= self._first:
            self._room += 1
        if self._room <= 0:
            self._changed.set()

    async def run(self) -> None:
        """Take more, or fewer, for as long as the consumer lasts."""
        while True:
            self._changed.clear()
            if self._is_too_wide():
                await self._take_up_to(max(1, self._allowed()))
            elif self._room > 0 or self._allowed() <= 0:
                await self._changed.wait()
            elif len(self._held) < self._target:
                await self._take_up_to(self._allowed())
            else:
                await self._raise_target()

    async def _raise_target(self) -> None:
        """Where none of the messages in hand gets finished, take more."""
        finished = self._finished
        await self._clock.sleep(PATIENCE)
        if finished == self._finished:
            self._target = len(self._held) + PREFETCH
            self._log.info("taking more messages, those in hand wait", queue=self._consumer.queue, held=len(self._held))
        else:
            self._target = PREFETCH

    def _allowed(self) -> int:
        """How many more there is room for, should each be as large as it may be."""
        if not self._held:
            return first_prefetch(self._largest)
        return min(PREFETCH, MAX_HELD - len(self._held), (MAX_HELD_BYTES - self._bytes) // self._largest)

    def _is_too_wide(self) -> bool:
        return self._prefetch > first_prefetch(self._largest)

    async def _take_up_to(self, number: int) -> None:
        """Consume anew, with `number` messages on top of those in hand."""
        assert self._channel is not None
        self._first = self._last + 1
        self._prefetch = self._room = number
        self._largest = max(self._max_message_bytes, *self._held.values(), 0)
        await self._channel.take_more(self._consumer, prefetch=number)
