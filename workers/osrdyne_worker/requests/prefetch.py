"""How many requests of one queue may be in the worker: its consumers, and what each request in the worker does.

AMQP's prefetch counts every request that is not acknowledged. Of several queues, only one request each may *wait* in
the worker, however many run; and a request that is put aside must not keep others away. So a queue is consumed through
several consumers ("lanes"), which are opened and closed as requests begin, are put aside, and are settled. In a steady
state nothing is opened or closed: the acknowledgement of one request brings the next.

Made by an intake each time that it consumes; the processor notes on the `Place` of a request what happens to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum

from osrdyne.amqp import Consumer


class State(Enum):
    WAITS = "waits"
    RUNS = "runs"
    ASIDE = "aside"
    SETTLES = "settles"


class Lane:
    """One consumer of the queue; None until RabbitMQ has answered."""

    def __init__(self, prefetch: int) -> None:
        self.prefetch = prefetch
        self.consumer: Consumer | None = None


class Place:
    """What one request does in the worker, for as long as it is there."""

    def __init__(self, lanes: Lanes, lane: Lane) -> None:
        self._lanes = lanes
        self.lane = lane
        self.state = State.WAITS

    def begin(self) -> None:
        """It runs now."""
        self._lanes.note(self, State.RUNS)

    def put_aside(self) -> None:
        """It stays in the worker, and others go first."""
        self._lanes.note(self, State.ASIDE)

    async def settle(self) -> None:
        """To be awaited right before it is acknowledged or given back."""
        await self._lanes.settle(self)

    def leave(self) -> None:
        """It has left the worker."""
        self._lanes.leave(self)


class Lanes:
    """The consumers of one queue.

    `limit`: requests that may be in the worker, those that run included; None: one may wait, whatever runs. `open_lane`
    begins to consume through one more lane; `close_lane` cancels its consumer, what it holds stays. `free`: how many
    requests could begin to run now.
    """

    def __init__(
        self,
        *,
        limit: int | None,
        free: Callable[[], int],
        open_lane: Callable[[Lane], None],
        close_lane: Callable[[Lane], Awaitable[None]],
    ) -> None:
        self._limit = limit
        self._free = free
        self._open_lane = open_lane
        self._close_lane = close_lane
        self._places: set[Place] = set()
        self.open: list[Lane] = []

    def start(self) -> None:
        self._open(1 if self._limit is None else self._limit)

    def stop(self) -> None:
        """Open no further lane."""
        self._open_lane = _open_none

    def place(self, lane: Lane) -> Place:
        """The place of a request that has come through `lane`."""
        place = Place(self, lane)
        self._places.add(place)
        return place

    @property
    def waiting(self) -> int:
        """Requests that wait in the worker for their turn."""
        return sum(place.state is State.WAITS for place in self._places)

    def note(self, place: Place, state: State) -> None:
        place.state = state
        for _ in range(-self._surplus()):
            self._open(1)

    async def settle(self, place: Place) -> None:
        """Close a lane first where the settlement would bring one request too many."""
        place.state = State.SETTLES
        if self._limit is None and self._surplus() > 0:
            await asyncio.sleep(0)  # the request that has just got its turn has not begun yet
        if self._surplus() > 0 and (lane := self._superfluous(place)) is not None:
            self.open.remove(lane)
            await self._close_lane(lane)

    def leave(self, place: Place) -> None:
        self._places.discard(place)

    def _open(self, prefetch: int) -> None:
        lane = Lane(prefetch)
        self.open.append(lane)
        self._open_lane(lane)

    def _surplus(self) -> int:
        """How many requests more than there should be can come, or wait, once what settles is settled."""
        held = sum(place.state is State.ASIDE and place.lane in self.open for place in self._places)
        can_come = sum(lane.prefetch for lane in self.open) - held
        if self._limit is not None:
            return can_come - self._limit
        running = sum(place.state is State.RUNS and place.lane in self.open for place in self._places)
        waits_elsewhere = sum(place.state is State.WAITS and place.lane not in self.open for place in self._places)
        return can_come - running + waits_elsewhere - 1 - self._free()

    def _superfluous(self, place: Place) -> Lane | None:
        """The lane to be closed when `place` is settled: its own, unless that has room for several."""
        if self._limit is None or place.lane.prefetch == 1 != self._limit:
            return place.lane if place.lane in self.open else None
        aside = {other.lane for other in self._places if other.state is State.ASIDE}
        spare = [lane for lane in self.open[1:] if lane not in aside]
        return spare[-1] if spare else None


def _open_none(_: Lane) -> None:
    return None
