"""A consumer that ends with an error when RabbitMQ cancels it or its channel closes (broker: plain-connections)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from osrdyne.amqp.message import Delivery
from osrdyne.errors import BrokerUnavailableError, OsrdyneError


class Consumer:
    """Deliveries of one queue, in RabbitMQ's order.

    `async for delivery in consumer` raises `BrokerUnavailableError` if RabbitMQ or the channel ends the consumer, and
    ends without an error after `Channel.cancel`.
    """

    def __init__(self, queue: str, *, tag: str = "", arguments: Mapping[str, object] | None = None) -> None:
        self.queue = queue
        self.tag = tag
        self.arguments = arguments or {}
        self._deliveries: asyncio.Queue[Delivery | None] = asyncio.Queue()
        self._error: OsrdyneError | None = None
        self._ended = False
        self._prefetch = 0
        self._held: set[int] = set()
        self.received = 0  # How many deliveries have arrived.
        self.skips: Callable[[Delivery], bool] | None = None
        """Whether a delivery is acknowledged without a reader."""

    def begin(self, prefetch: int) -> None:
        """Note that RabbitMQ may send `prefetch` deliveries from now on, besides those that are held already.

        0: without a limit.
        """
        self._prefetch = prefetch
        self._held.clear()

    def settle(self, tag: int, *, multiple: bool = False) -> None:
        """Note that a delivery was acknowledged or returned; with `multiple` all up to it."""
        if multiple:
            self._held = {held for held in self._held if held > tag}
        else:
            self._held.discard(tag)

    @property
    def has_room(self) -> bool:
        """Whether RabbitMQ may send another delivery now."""
        return not self._ended and (self._prefetch == 0 or len(self._held) < self._prefetch)

    def put(self, delivery: Delivery) -> None:
        """Add a delivery for the reader. After the end it is dropped, and stays unacknowledged."""
        if not self._ended:
            self.received += 1
            if self._prefetch:
                self._held.add(delivery.tag)
            self._deliveries.put_nowait(delivery)

    def end(self, error: OsrdyneError | None = None) -> None:
        """Accept no more deliveries; the reader still gets those that have arrived."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._deliveries.put_nowait(None)

    @property
    def ended(self) -> bool:
        return self._ended

    def waiting(self) -> int:
        """Return how many deliveries have arrived and were not read yet."""
        # Without the None at the end of the queue.
        return self._deliveries.qsize() - (1 if self._ended else 0)

    async def get(self) -> Delivery:
        """Return the next delivery. Raises `BrokerUnavailableError` after the last one, when the consumer has ended."""
        while True:
            delivery = await self._deliveries.get()
            if delivery is None:
                self._deliveries.put_nowait(None)
                raise self._error or BrokerUnavailableError(f"The consumer of {self.queue} was closed.")
            if self.skips is None or not self.skips(delivery):
                return delivery
            await delivery.ack()

    def __aiter__(self) -> Consumer:
        return self

    async def __anext__(self) -> Delivery:
        try:
            return await self.get()
        except BrokerUnavailableError:
            if self._error is None:  # ended by this side
                raise StopAsyncIteration from None
            raise
