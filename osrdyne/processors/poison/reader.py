"""One reading of the poison queue: entry by entry, in batches; at its end everything is requeued.

`basic.get` would cost the quorum queue a write to disk for each message; a consumer gets a batch for one. Created by
`PoisonInventory`, one at a time.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from osrdyne.aio.tasks import off_loop
from osrdyne.amqp import Channel, Consumer, Delivery
from osrdyne.errors import BrokerError
from osrdyne.processors.poison.entries import entry_id, view_entry
from osrdyne.protocol.poison import PoisonRecord

BATCH = 50  # Messages prefetched at once, which limits the bodies in memory.
ARRIVAL_TIMEOUT = 5.0  # Seconds to wait for a counted message; if it does not arrive, another consumer has taken it.


class Reading:
    """An iterator over the entries, each with its delivery. Keeps delivery tags and no bodies."""

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
        """Read this many messages; later ones are left for the next reading."""
        self._expected = count

    def __aiter__(self) -> Reading:
        return self

    async def __anext__(self) -> tuple[PoisonRecord, Delivery]:
        while (delivery := await self._next()) is not None:
            # Noted before anything can fail: all held messages are requeued at the end, tag by tag.
            self._held[delivery.tag] = None
            if self._is_forged(delivery):
                # A forged entry is dropped at the first reading: shown to an operator, it could be replayed as a
                # request.
                await self.remove(delivery)
                continue
            # Renewed: the copy is confirmed, and only then the original is removed below.
            if not await self._renew(delivery):
                return view_entry(delivery, name=await self._name(delivery)), delivery
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
                # A prefetch of the batch bounds the memory: bodies may be large.
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
        """Cancel the consumer and take the messages that arrived because others were acknowledged."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            # Before the next batch: with two consumers, acknowledgements would let more than a batch arrive.
            await self._channel.cancel(consumer)
            while consumer.waiting():
                self._arrived.append(await consumer.get())

    async def _name(self, delivery: Delivery) -> str:
        """The id of the entry; further entries that are exactly alike get a number."""
        # In a thread if it is large: the id is a digest of the body, and a reading has up to ten thousand bodies.
        name = await off_loop(len(delivery.body), entry_id, delivery)
        self._named[name] += 1
        # Two entries that are exactly alike must have two ids, or one of them could never be removed alone.
        return name if self._named[name] == 1 else f"{name}.{self._named[name]}"

    async def remove(self, delivery: Delivery) -> None:
        await delivery.ack()
        del self._held[delivery.tag]

    async def requeue(self) -> int:
        """Requeue all held messages (not counted as a failure on 4.3) and close the channel; how many there were.

        When the channel is lost, RabbitMQ has requeued them itself.
        """
        with suppress(BrokerError):
            await self._end_batch()
            self._held |= dict.fromkeys(delivery.tag for delivery in self._arrived)
            for tag in self._held:
                # nack and not reject: 4.3 counts a reject as a failed delivery (broker: count-failures-by-reject).
                await self._channel.nack(tag, requeue=True)
        await self._channel.close()
        return len(self._held)
