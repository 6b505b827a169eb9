"""One reading of the poison queue: entry by entry, in batches, and then everything goes back.

`basic.get` would do, but costs a quorum queue a write to disk for each message; a consumer gets a batch for one. Made
by `PoisonInventory`, which sees to it that there is only one at a time.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from osrdyne.amqp import Channel, Consumer, Delivery
from osrdyne.errors import BrokerError
from osrdyne.pool.views import PoisonView
from osrdyne.processors.poison.entries import entry_id, view_entry

BATCH = 50
"""Messages under way at once, and so the bodies in memory."""
ARRIVAL_TIMEOUT = 5.0
"""Seconds for a message that was counted; somebody else has taken one that does not come."""


class Reading:
    """The entries one by one, each with its delivery. Remembers delivery tags, no bodies."""

    def __init__(
        self,
        channel: Channel,
        queue: str,
        renew: Callable[[Delivery], Awaitable[bool]],
        *,
        is_forged: Callable[[Delivery], bool],
    ) -> None:
        self._channel = channel
        self._queue = queue
        self._renew = renew
        self._is_forged = is_forged
        self._expected = 0
        self._consumer: Consumer | None = None
        self._batch = 0
        self._arrived: deque[Delivery] = deque()
        self._held: dict[int, None] = {}
        self._named: Counter[str] = Counter()

    def expect(self, count: int) -> None:
        """Read so many messages; what comes into the queue meanwhile is for the next reading."""
        self._expected = count

    def __aiter__(self) -> Reading:
        return self

    async def __anext__(self) -> tuple[PoisonView, Delivery]:
        while (delivery := await self._next()) is not None:
            self._held[delivery.tag] = None
            if self._is_forged(delivery):
                await self.remove(delivery)
                continue
            if not await self._renew(delivery):
                return view_entry(delivery, name=self._name(delivery)), delivery
            await self.remove(delivery)
            self._expected += 1  # its copy
        raise StopAsyncIteration

    async def _next(self) -> Delivery | None:
        while not self._arrived:
            if self._batch == 0:
                await self._end_batch()
                if self._arrived:
                    break
                if self._expected <= 0:
                    return None
                self._batch = min(BATCH, self._expected)
                self._consumer = await self._channel.consume(self._queue, prefetch=self._batch)
            assert self._consumer is not None
            try:
                async with asyncio.timeout(ARRIVAL_TIMEOUT):
                    self._arrived.append(await self._consumer.get())
            except TimeoutError:
                return None
            self._batch -= 1
        self._expected -= 1
        return self._arrived.popleft()

    async def _end_batch(self) -> None:
        """Consume no more. What an acknowledgement has let in meanwhile has arrived as well."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await self._channel.cancel(consumer)
            while consumer.waiting():
                self._arrived.append(await consumer.get())

    def _name(self, delivery: Delivery) -> str:
        """The id; the second and third of entries that are exactly alike get a number."""
        name = entry_id(delivery)
        self._named[name] += 1
        return name if self._named[name] == 1 else f"{name}.{self._named[name]}"

    async def remove(self, delivery: Delivery) -> None:
        await delivery.ack()
        del self._held[delivery.tag]

    async def give_back(self) -> int:
        """Give back what is held (not counted as a failure on 4.3) and close; how many there were.

        On a channel that is lost the broker has done so itself.
        """
        with suppress(BrokerError):
            await self._end_batch()
            self._held |= dict.fromkeys(delivery.tag for delivery in self._arrived)
            for tag in self._held:
                await self._channel.nack(tag, requeue=True)
        await self._channel.close()
        return len(self._held)
