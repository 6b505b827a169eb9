"""Consumers of the request queues of single groups, used by the responders that answer requests in place of workers.

Each group has a channel of its own: closing it returns the requests that are not answered. While answers wait for their
reply queues, the channel stays open without consumers, so that no delivery of their requests is counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from osrdyne.amqp import Channel, Consumer, Delivery
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.errors import BrokerError
from osrdyne.logs import Logger, get_logger
from osrdyne.processors.consumers import ErrorBoundary, to_dead_letters
from osrdyne.processors.replies import SetAside, until_set_aside
from osrdyne.protocol.names import Key, QueueName


@dataclass(slots=True)
class _Attachment:
    """The consumers of one group of workers. `tasks`: of the answers. `aside`: requests in the prefetch of a queue
    whose answers wait. `waiting`: such requests of all queues. `has_ended`: the last of them closes the channel."""

    channel: Channel
    tasks: asyncio.TaskGroup
    consumers: list[Consumer] = field(default_factory=list)
    aside: Counter[str] = field(default_factory=Counter)
    waiting: set[Delivery] = field(default_factory=set)
    has_ended: bool = False


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
        self._attached: dict[Key, _Attachment] = {}
        self._attachments: dict[Channel, _Attachment] = {}  # also those that are detached
        self._log: Logger = get_logger("group_consumers", pool=layout.names.pool)

    @asynccontextmanager
    async def attach(self, key: Key, tasks: asyncio.TaskGroup) -> AsyncIterator[list[Consumer]]:
        """Consume every queue of a group of workers until the end of the block. Raises `BrokerError`. `tasks`: gets
        those of the answers."""
        channel = await self._open_channel()
        attachment = self._attachments[channel] = _Attachment(channel, tasks)
        try:
            for queue in self._queues_of(key):
                consumer = await channel.consume(queue, prefetch=self._prefetch, arguments=self._arguments)
                attachment.consumers.append(consumer)
            self._attached[key] = attachment
            yield attachment.consumers
            # Every request that was taken is answered or returned by now, except those whose answers wait.
            attachment.has_ended = bool(attachment.waiting) and not channel.is_closed
        finally:
            self._attached.pop(key, None)
            if not attachment.has_ended:
                await self._close(attachment)

    async def _close(self, attachment: _Attachment) -> None:
        self._attachments.pop(attachment.channel, None)
        await attachment.channel.close()

    async def answer(
        self, key: Key, consumer: Consumer, delivery: Delivery, answer: Callable[[SetAside], Awaitable[None]]
    ) -> None:
        """Call `answer` for a request, and return when it ends or waits for a reply queue: the next request may be
        answered. Raises `BrokerError`."""
        attachment = self._attachments[delivery.channel]

        async def work(set_aside: SetAside) -> None:
            def wait() -> None:
                attachment.waiting.add(delivery)
                attachment.aside[consumer.queue] += 1
                set_aside()

            try:
                with ErrorBoundary(delivery, self._log) as boundary:
                    await answer(wait)
                if boundary.failed:
                    await to_dead_letters(delivery)
            finally:
                attachment.waiting.discard(delivery)
                if attachment.has_ended and not attachment.waiting:
                    await self._close(attachment)

        await until_set_aside(attachment.tasks, work, name=f"answer for {key!r}", on_late_error=self._note_lost)
        if attachment.aside[consumer.queue] >= self._prefetch:
            # They use up the prefetch, and others must be answered meanwhile.
            attachment.aside[consumer.queue] = 0
            await attachment.channel.take_more(consumer, prefetch=self._prefetch)

    def _note_lost(self, error: BrokerError) -> None:
        # The channel is lost: RabbitMQ has returned the request, and it is answered a second time.
        self._log.debug("waiting answer not acknowledged", error=str(error))

    async def detach(self, key: Key) -> None:
        """Take no further request of a group; those that were taken can still be answered."""
        # Popped first: of two concurrent calls only one cancels the consumers.
        attached = self._attached.pop(key, None)
        if attached is not None:
            try:
                for consumer in attached.consumers:
                    await attached.channel.cancel(consumer)
            except BrokerError:
                # A consumer that is left may still get requests, which this responder does not answer any more: the
                # close returns them, and those whose answers wait. A lost connection has done so.
                await attached.channel.close()

    def lacks_queue(self, key: Key) -> bool:
        """Whether a queue of the group is not consumed, because its priority level came into use later."""
        attached = self._attached.get(key)
        return attached is not None and [consumer.queue for consumer in attached.consumers] != self._queues_of(key)

    def _queues_of(self, key: Key) -> list[QueueName]:
        return [queue.name for queue in self._layout.existing(key)]
