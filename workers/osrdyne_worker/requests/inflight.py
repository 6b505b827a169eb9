"""One request from its arrival to its acknowledgement (`InFlight`), and the places in which requests run (`Slots`).

Everything here lives on the event loop. The processor drives a request; anybody may interrupt it, once.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from itertools import count

from osrdyne.amqp import Delivery
from osrdyne.protocol.fingerprints import fingerprint
from osrdyne.protocol.messages import Request
from osrdyne_worker.app.call import Call
from osrdyne_worker.requests.prefetch import Place
from osrdyne_worker.requests.priorities import Backlog, Backlogs
from osrdyne_worker.runtime.connection import Link


class Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SETTLING = "settling"
    """Its answer is being sent; from here on nothing interrupts it."""


class Interruption(StrEnum):
    """Why a request was not worked on to its end."""

    EXPIRED = "expired"
    CANCELLED = "cancelled"
    GIVEN_BACK = "given-back"
    """This worker stops or pauses: another one, or a later one, gets it."""
    LOST = "lost"
    """Its channel is closed: RabbitMQ has taken it back already, and an answer could not be acknowledged."""


@dataclass(slots=True, eq=False)
class InFlight:
    """A request in this worker."""

    delivery: Delivery = field(repr=False)
    request: Request = field(repr=False)
    call: Call = field(repr=False)
    link: Link = field(repr=False)
    group_id: str
    rank: int
    received_at: float
    backlog: Backlog | None = None
    place: Place | None = None
    started: bool = False
    is_suspect: bool = False
    """An earlier worker may have died of it: it runs last, and alone."""
    waits: bool = True
    """For its turn, as its level sees it."""
    is_reported: bool = False
    goes_to_wait: bool = False
    """It failed and is to be tried again: a cancel is meant for the next attempt."""
    has_slot: bool = False
    in_handler: bool = False
    """Its handler runs; also after the request was interrupted and settled, until the handler ends."""
    settling: asyncio.Task[None] | None = field(default=None, repr=False)
    """Settles an interrupted request while its handler may still run."""
    phase: Phase = Phase.WAITING
    interruption: Interruption | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)
    progress: set[asyncio.Task[None]] = field(default_factory=set, repr=False)
    _fingerprint: str | None = field(default=None, repr=False)

    @property
    def fingerprint(self) -> str:
        """What reports call it. Made when it is first asked for: most requests are never named."""
        if self._fingerprint is None:
            request = self.request
            self._fingerprint = fingerprint(
                key=request.key,
                path=request.path,
                correlation_id=request.correlation_id,
                reply_to=request.reply_to,
                message_id=self.delivery.properties.message_id,
                body=request.body,
            )
        return self._fingerprint

    def interrupt(self, reason: Interruption) -> bool:
        """Stop the work on it for `reason`; False when it is being answered already or was interrupted before.

        A task that has not begun to run is not cancelled (it would never get to its clean-up): it looks by itself.
        """
        if self.phase is Phase.SETTLING or self.interruption is not None:
            return False
        self.interruption = reason
        self.call.cancel()
        if self.task is not None and self.started:
            self.task.cancel()
        return True

    def claim(self) -> bool:
        """Begin to settle the request; False when another task has begun. Nothing interrupts it from here on."""
        if self.phase is Phase.SETTLING:
            return False
        self.phase = Phase.SETTLING
        return True

    def begin(self) -> None:
        """It has its turn."""
        self._end_wait()
        if self.place is not None:
            self.place.begin()

    def put_aside(self) -> None:
        """Others go first, also those that come later."""
        self._end_wait()
        if self.place is not None:
            self.place.put_aside()

    def leave(self) -> None:
        """It has left the worker."""
        self._end_wait()
        if self.place is not None:
            self.place.leave()
        if self.backlog is not None:
            self.backlog.settled()

    def _end_wait(self) -> None:
        if self.waits and self.backlog is not None:
            self.backlog.begin()
        self.waits = False

    async def ack(self) -> None:
        await self._before_settling()
        await self.delivery.ack()

    async def nack(self) -> None:
        await self._before_settling()
        await self.delivery.nack(requeue=True)

    async def reject(self, *, requeue: bool = True) -> None:
        await self._before_settling()
        await self.delivery.reject(requeue=requeue)

    async def _before_settling(self) -> None:
        if self.place is not None:
            await self.place.settle()

    def disarm(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Slots:
    """`size` places to run in; the lowest rank (highest priority) that waits comes next, then the longest waiting.

    Nobody gets a place while a higher class may hold a request that has not come yet. `spawn` starts the task that
    finds out.
    """

    def __init__(
        self,
        size: int,
        *,
        backlogs: Backlogs | None = None,
        spawn: Callable[[Coroutine[None, None, None]], object] | None = None,
    ) -> None:
        self._size = self._free = size
        self._backlogs = backlogs
        self._spawn = spawn
        self._asking = False
        self._waiting: list[tuple[int, int, asyncio.Future[None], bool]] = []
        self._order = count()

    @property
    def free(self) -> int:
        return self._free

    def try_acquire(self, rank: int = 0) -> bool:
        """Take a place if one is free, nobody waits and no higher class may be first."""
        if self._free == 0 or self._waiting or self._must_ask(rank):
            return False
        self._free -= 1
        return True

    async def acquire(self, rank: int) -> None:
        if self.try_acquire(rank):
            return
        await self._wait_turn(rank, alone=False)

    async def acquire_all(self, rank: int, *, patience: float) -> None:
        """Take all places, once nothing is before it. After `patience` seconds it comes before everything."""
        timer = asyncio.get_running_loop().call_later(patience, self._promote, order := next(self._order))
        try:
            await self._wait_turn(rank, alone=True, order=order)
        finally:
            timer.cancel()

    async def _wait_turn(self, rank: int, *, alone: bool, order: int | None = None) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, next(self._order) if order is None else order, turn, alone))
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the turn came together with the cancellation: pass it on
                self.release(all_places=alone)
            else:
                turn.cancel()
                self._hand_out()
            raise

    def _promote(self, order: int) -> None:
        self._waiting = [(-1 if one[1] == order else one[0], *one[1:]) for one in self._waiting]
        heapq.heapify(self._waiting)
        self._hand_out()

    def release(self, *, all_places: bool = False) -> None:
        self._free += self._size if all_places else 1
        self._hand_out()

    def _must_ask(self, rank: int) -> bool:
        return self._backlogs is not None and self._backlogs.block(rank)

    def _hand_out(self) -> None:
        while self._free and self._waiting:
            rank, _, turn, alone = self._waiting[0]
            if turn.done():
                heapq.heappop(self._waiting)
            elif alone and self._free < self._size:
                return
            elif self._must_ask(rank):
                self._ask()
                return
            else:
                heapq.heappop(self._waiting)
                self._free -= self._size if alone else 1
                turn.set_result(None)

    def _ask(self) -> None:
        if not self._asking and self._spawn is not None:
            self._asking = True
            self._spawn(self._find_out())

    async def _find_out(self) -> None:
        """Ask until it is known which class is next; it may change meanwhile."""
        try:
            while self._free and self._waiting and self._backlogs and self._must_ask(self._waiting[0][0]):
                await self._backlogs.look(self._waiting[0][0])
        finally:
            self._asking = False
        self._hand_out()
