"""The order in which the messages of one channel are published; `channel` asks it before each one.

aiormq finds the publish that a returned message belongs to by its message id alone: of two in flight with the same id,
the one that no queue took would count as confirmed, and be lost. So messages of one id go one after the other. What is
published to the same place after one that waits for that waits behind it: requests of a key keep their order, whatever
ids their clients give them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

Place = tuple[str, str]
"""Exchange and routing key."""

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Line:
    """Who is first, and how many are there."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class Turns:
    """Whose turn it is on one channel."""

    def __init__(self) -> None:
        self._ids: dict[str, _Line] = {}
        self._places: dict[Place, _Line] = {}

    def is_free(self, message_id: str | None, place: Place) -> bool:
        """Whether a message needs no turn: nearly always, for one without an id."""
        return not message_id and place not in self._places

    @asynccontextmanager
    async def turn(self, message_id: str | None, place: Place) -> AsyncIterator[None]:
        """Publish inside. Messages of one place get here in the order in which they asked."""
        async with AsyncExitStack() as mine:
            if place in self._places or message_id in self._ids:
                async with _in_line(self._places, place):
                    await self._take(message_id, mine)
            else:
                await self._take(message_id, mine)
            yield

    async def _take(self, message_id: str | None, mine: AsyncExitStack) -> None:
        if message_id:
            await mine.enter_async_context(_in_line(self._ids, message_id))


@asynccontextmanager
async def _in_line(lines: dict[K, _Line], name: K) -> AsyncIterator[None]:
    line = lines.setdefault(name, _Line())
    line.users += 1
    try:
        async with line.lock:
            yield
    finally:
        line.users -= 1
        if line.users == 0:
            del lines[name]
