"""The order in which the messages of one channel are published; `Channel` takes a ticket for each publish.

aiormq finds the publish of a returned message by the message id alone. If two messages with the same id were in flight,
the returned one could count as confirmed and be lost. So messages with the same id are published one after the other. A
message to a destination where one already waits for its id waits behind it: the requests of a key keep their order,
whichever ids their clients choose.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

Destination = tuple[str, str]  # Exchange and routing key.

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Line:
    """A fair lock, and how many publishes use it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class PublishOrder:
    """Which message of one channel may be published now."""

    def __init__(self) -> None:
        self._ids: dict[str, _Line] = {}
        self._destinations: dict[Destination, _Line] = {}

    def is_free(self, message_id: str | None, destination: Destination) -> bool:
        """Whether a message needs no ticket. True for most messages without an id."""
        # A destination has a line only while one of its messages waits for its id.
        return not message_id and destination not in self._destinations

    @asynccontextmanager
    async def ticket(self, message_id: str | None, destination: Destination) -> AsyncIterator[None]:
        """Publish inside. Messages to one destination enter in the order of the calls."""
        async with AsyncExitStack() as held:
            if destination in self._destinations or message_id in self._ids:
                async with _in_line(self._destinations, destination):
                    await self._enter(message_id, held)
            else:
                await self._enter(message_id, held)
            yield

    async def _enter(self, message_id: str | None, held: AsyncExitStack) -> None:
        if message_id:
            await held.enter_async_context(_in_line(self._ids, message_id))


@asynccontextmanager
async def _in_line(lines: dict[K, _Line], name: K) -> AsyncIterator[None]:
    line = lines.setdefault(name, _Line())
    line.users += 1
    try:
        async with line.lock:
            yield
    finally:
        line.users -= 1
        # The last user removes it: the names come from clients, and would grow without limit.
        if line.users == 0:
            del lines[name]
