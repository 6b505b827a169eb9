"""The order of what goes into one queue, where a publish must be tried again. Used by the ingress only.

Requests are published without waiting for each other's confirm. When one of them is refused, or not confirmed, those
behind it wait until it is in its queue; otherwise they would overtake it. What was under way behind it at that moment
cannot be called back: whatever befell the first one befalls those as well, nearly always, and then all of them go
again in their order. It publishes nothing itself.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from osrdyne.protocol.names import Key


class Lanes:
    """One lane for each queue that requests are on their way into: a group's queue of one class."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[Key, int | None], _Lane] = {}

    def enter(self, key: Key, priority: int | None) -> Place:
        """A place behind everything that was there before; `with` it, so that it is left in the end."""
        name = (key, priority)
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _Lane()
        return Place(self, name, lane)

    def __len__(self) -> int:
        return len(self._lanes)

    def close(self, name: tuple[Key, int | None]) -> None:
        del self._lanes[name]


class _Lane:
    """Places in their order, which of them have failed to be published, and which of them wait."""

    def __init__(self) -> None:
        self.places: dict[Place, None] = {}
        self.failed: set[Place] = set()
        self.waiting: dict[Place, asyncio.Event] = {}

    @property
    def first(self) -> Place:
        return next(iter(self.places))

    def leave(self, place: Place) -> None:
        """Wake who may go on now: the first, or everybody once nobody has to be tried again."""
        del self.places[place]
        self.failed.discard(place)
        self.waiting.pop(place, None)
        if not self.waiting:
            return
        for next_one in [self.first] if self.failed else list(self.waiting):
            called = self.waiting.pop(next_one, None)
            if called is not None:
                called.set()


class Place:
    """One request in a lane."""

    def __init__(self, lanes: Lanes, name: tuple[Key, int | None], lane: _Lane) -> None:
        self._lanes = lanes
        self._name = name
        self._lane = lane
        lane.places[self] = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lane.leave(self)
        if not self._lane.places:
            self._lanes.close(self._name)

    async def turn(self) -> None:
        """Wait until this may be published: at once while nobody in the lane has failed, else as the first of it."""
        lane = self._lane
        while lane.failed and lane.first is not self:
            called = lane.waiting[self] = asyncio.Event()
            await called.wait()

    def fail(self) -> None:
        """This could not be published, and will be tried again."""
        self._lane.failed.add(self)
