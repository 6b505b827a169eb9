"""The prefetch of a consumer: no more messages than fit into memory, and enough to keep the processor busy.

A prefetch counts messages, regardless of their size. The first prefetch is the number of messages that fit into
`MAX_HELD_BYTES` if each is as large as `requests.max_message_bytes` permits. When all of them have arrived, their size
is known. If they were small, the processor consumes again on the same channel, with a prefetch for the rest of
`MAX_HELD_BYTES`, and keeps the messages that it holds.

The processor holds up to `PREFETCH` messages in this way. While all of them wait, for example for a key whose worker is
being stopped, it takes more, up to `MAX_HELD`. Messages that are set aside, because they wait for room in a full queue,
do not count. Used by the forwarder and the dead letter responder.
"""

from __future__ import annotations

import asyncio

from osrdyne.aio.clock import Clock
from osrdyne.aio.signals import Wakeup
from osrdyne.amqp import Channel, Consumer, Delivery
from osrdyne.logs import Logger, get_logger

PREFETCH = 256
PATIENCE = 1.0  # Seconds in which none of the held messages was finished, before more are taken.
MAX_HELD = 20_000
MAX_HELD_BYTES = 512 * 2**20


def first_prefetch(max_message_bytes: int) -> int:
    """The prefetch that a consumer begins with: as many messages as fit if each is as large as permitted."""
    return max(1, min(PREFETCH, MAX_HELD_BYTES // max_message_bytes))


class AdaptivePrefetch:
    """The messages that one consumer holds unacknowledged; the consumer was opened with `first_prefetch`."""

    def __init__(self, consumer: Consumer, *, max_message_bytes: int, clock: Clock) -> None:
        self._consumer = consumer
        self._max_message_bytes = max_message_bytes
        self._clock = clock
        self._channel: Channel | None = None
        self._held: dict[int, int] = {}
        self._bytes = 0
        self._first = 0
        self._last = 0
        self._largest = max_message_bytes  # messages may exceed it, up to RabbitMQ's own limit
        self._prefetch = self._room = first_prefetch(max_message_bytes)
        self._target = PREFETCH
        self._finished = 0
        self._changed = asyncio.Event()
        self._aside: set[int] = set()
        self._aside_more = Wakeup(clock)
        self._log: Logger = get_logger("prefetch")

    def take(self, delivery: Delivery) -> None:
        """Note a message that has arrived."""
        size = len(delivery.body)
        self._channel = delivery.channel
        self._held[delivery.tag] = size
        self._last = delivery.tag
        self._bytes += size
        # A message may be larger than configured. From now on the limit counts with its size.
        self._largest = max(self._largest, size)
        self._room -= 1
        if self._room <= 0 or self._is_too_large():
            self._changed.set()

    def set_aside(self, delivery: Delivery) -> None:
        """Note a message that may wait for long: others may be taken meanwhile."""
        self._aside.add(delivery.tag)
        if self._room <= 0:
            self._changed.set()
            self._aside_more.set()

    def take_back(self, delivery: Delivery) -> None:
        """Note that a message that was set aside is processed further, and counts again."""
        self._aside.discard(delivery.tag)

    def finish(self, delivery: Delivery) -> None:
        """Note a message that was acknowledged or rejected."""
        self._aside.discard(delivery.tag)
        self._bytes -= self._held.pop(delivery.tag)
        self._finished += 1
        # An earlier message counts against an earlier consumer of the channel, whose prefetch is not used any more.
        if delivery.tag >= self._first:
            self._room += 1
        if self._room <= 0:
            self._changed.set()

    async def run(self) -> None:
        """Raise and lower the prefetch as messages arrive and end; runs until it is cancelled."""
        while True:
            self._changed.clear()
            if self._is_too_large():
                await self._take_up_to(max(1, self._allowed()))
            elif self._room > 0 or self._allowed() <= 0:
                await self._changed.wait()
            elif len(self._held) - len(self._aside) < self._target:
                await self._take_up_to(self._allowed())
            else:
                await self._raise_target()

    async def _raise_target(self) -> None:
        """Take more messages if none of the held ones is finished in time."""
        finished = self._finished
        # A processor that makes progress needs no more messages; one whose messages all wait for a bind does.
        if await self._aside_more.wait(PATIENCE):
            return
        if finished == self._finished:
            self._target = len(self._held) - len(self._aside) + PREFETCH
            self._log.info("prefetch raised, held messages wait", queue=self._consumer.queue, held=len(self._held))
        else:
            self._target = PREFETCH

    def _allowed(self) -> int:
        """How many more messages fit if each is as large as permitted."""
        if not self._held:
            return first_prefetch(self._largest)
        return min(PREFETCH, MAX_HELD - len(self._held), (MAX_HELD_BYTES - self._bytes) // self._largest)

    def _is_too_large(self) -> bool:
        return self._prefetch > first_prefetch(self._largest)

    async def _take_up_to(self, number: int) -> None:
        """Consume again, with `number` messages on top of the held ones."""
        assert self._channel is not None
        # Tags of later deliveries are higher: by this number `finish` finds out which consumer a message came through.
        self._first = self._last + 1
        self._prefetch = self._room = number
        # A large message that is finished must not keep the prefetch small.
        self._largest = max(self._max_message_bytes, *self._held.values(), 0)
        # On the same channel: held messages keep their delivery tags, and return in order if it is lost.
        await self._channel.take_more(self._consumer, prefetch=number)
