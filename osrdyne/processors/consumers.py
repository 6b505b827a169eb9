"""The consumers of the controller's own queues: one processor for each, opened in a given order and ended together.

Each has a channel of its own, so that one that is slow holds back no other. Used by the term; it never opens a
connection, and it never decides when a term ends: a processor that fails ends the task group that it runs in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from osrdyne.amqp import Channel, Consumer
from osrdyne.logs import Logger, get_logger

DRAIN_TIMEOUT = 10.0
"""How long an orderly end waits for what the consumers have taken, seconds."""


@dataclass(frozen=True, slots=True)
class Processor:
    """What consumes one queue."""

    queue: str
    prefetch: int
    run: Callable[[Consumer], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class _Consuming:
    """A processor at work."""

    channel: Channel
    consumer: Consumer
    task: asyncio.Task[None]


class ControllerConsumers:
    """The processors of one term."""

    def __init__(self, processors: Sequence[Processor], *, open_channel: Callable[[], Awaitable[Channel]]) -> None:
        self._processors = processors
        self._open_channel = open_channel
        self._consuming: list[_Consuming] = []
        self._log: Logger = get_logger("consumers")

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Consume every queue, in the order given."""
        for processor in self._processors:
            channel = await self._open_channel()
            consumer = await channel.consume(processor.queue, prefetch=processor.prefetch)
            task = group.create_task(processor.run(consumer), name=f"consumer of {processor.queue}")
            self._consuming.append(_Consuming(channel, consumer, task))

    async def finish(self) -> None:
        """Stop consuming, and finish what has been taken; what is not finished in time goes back to its queue."""
        for consuming in self._consuming:
            await consuming.channel.cancel(consuming.consumer)
        _, late = await asyncio.wait([consuming.task for consuming in self._consuming], timeout=DRAIN_TIMEOUT)
        for task in late:
            self._log.warning("messages go back to their queue", consumer=task.get_name())
            task.cancel()
