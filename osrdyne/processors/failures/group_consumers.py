"""Consumers of the request queues of single groups, used by the responders that answer requests in place of workers.

Each group has a channel of its own: closing it returns the requests that are not answered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from osrdyne.amqp import Channel, Consumer
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.errors import BrokerError
from osrdyne.protocol.names import Key, QueueName


class GroupConsumers:
    """The consumers of one responder. `prefetch`: unacknowledged requests of each queue at most."""

    def __init__(
        self,
        layout: QueueLayout,
        open_channel: Callable[[], Awaitable[Channel]],
        *,
        prefetch: int,
        arguments: Mapping[str, object] | None = None,
    ) -> None:
        self._layout = layout
        self._open_channel = open_channel
        self._prefetch = prefetch
        self._arguments = arguments
        self._attached: dict[Key, tuple[Channel, list[Consumer]]] = {}

    @asynccontextmanager
    async def attach(self, key: Key) -> AsyncIterator[list[Consumer]]:
        """Consume every queue of a group until the end of the block. Raises `BrokerError`."""
        channel = await self._open_channel()
        try:
            consumers = [
                await channel.consume(queue, prefetch=self._prefetch, arguments=self._arguments)
                for queue in self._queues_of(key)
            ]
            self._attached[key] = channel, consumers
            yield consumers
        finally:
            self._attached.pop(key, None)
            await channel.close()

    async def detach(self, key: Key) -> None:
        """Take no further request of a group; those that were taken can still be answered."""
        # Popped first: of two concurrent calls only one cancels the consumers.
        attached = self._attached.pop(key, None)
        if attached is not None:
            channel, consumers = attached
            for consumer in consumers:
                with suppress(BrokerError):  # a lost connection has ended the consumer anyway
                    await channel.cancel(consumer)

    def lacks_queue(self, key: Key) -> bool:
        """Whether a queue of the group is not consumed, because its priority level came into use later."""
        attached = self._attached.get(key)
        return attached is not None and [consumer.queue for consumer in attached[1]] != self._queues_of(key)

    def _queues_of(self, key: Key) -> list[QueueName]:
        return [queue.name for queue in self._layout.existing(key)]
