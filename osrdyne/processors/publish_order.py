"""The order of what goes into one queue, where a publish must be tried again. Used by ingress and queue cleaner.

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
    """Places in their order, which of them have failed to be published, and which of them wait, called or not."""

    def __init__(self) -> None:
        self.places: dict[Place, None] = {}
        self.failed: set[Place] = set()
        self.waiting: dict[Place, asyncio.Event] = {}

    @property
    def first(self) -> Place:
        return next(iter(self.places))

    def lets_go(self, place: Place) -> bool:
        """Whether it may be published now. Who comes new lets those go first that wait, also if they were called."""
        if self.failed:
            return self.first is place
        return next(iter(self.waiting), place) is place

    def call_next(self) -> None:
        """Wake who may go on now: the first, or, once nobody has to be tried again, one after the other."""
        if self.waiting:
            called = self.waiting.get(self.first if self.failed else next(iter(self.waiting)))
            if called is not None:
                called.set()

    def leave(self, place: Place) -> None:
        del self.places[place]
        self.failed.discard(place)
        self.waiting.pop(place, None)
        self.call_next()


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
        while not lane.lets_go(self):
            called = lane.waiting.setdefault(self, asyncio.Event())
            called.clear()
            await called.wait()
        if lane.waiting.pop(self, None) is not None:
            lane.call_next()

    def hold_back(self) -> None:
        """Let nobody behind this be published until it is left: it has to be tried again, or is no request at all but
        work on the queue."""
        self._lane.failed.add(self)
