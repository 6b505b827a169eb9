"""Strict priority between the queues of a worker: which request runs next.

RabbitMQ delivers the next request of a queue only after the acknowledgement of the last one: for a moment the queue
seems empty although it is not. So before a request of a lower level runs, `Slots` asks RabbitMQ about the queues of the
higher levels (`PriorityLevel`). A queue that is unreachable does not block lower levels.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from itertools import count

from osrdyne.aio.clock import Clock
from osrdyne.aio.signals import Wakeup
from osrdyne.errors import BrokerError
from osrdyne.protocol.names import QueueName
from osrdyne_worker.requests.scheduling.rates import EventBudget

DELIVERY_TIMEOUT = 0.5
"""Seconds to wait for a delivery of a queue that is not empty, before the queue is checked again."""
MAX_SILENT_CHECKS = 6
"""Checks in a row without an answer, after which the queue no longer blocks lower levels."""

_PROMOTED = -1
"""The priority of suspects that have waited long enough: above every level."""
_BEGUN = -2
"""The priority of requests that have begun and wait for a slot again."""


class PriorityLevel:
    """The state of the queue of one priority level. Updated by its intake and by the requests of the queue.

    `count_ready` returns the number of requests in the queue that the processor has not received; None if unknown.
    """

    def __init__(self, clock: Clock) -> None:
        self.priority = 0
        self._count_ready: Callable[[], Awaitable[int | None]] | None = None
        self._consumed = False
        self._reachable = False
        self._empty = False
        self._checking = False
        self._waiting = 0
        self._silent_checks = 0
        self._changed = Wakeup(clock)

    @property
    def blocks(self) -> bool:
        """Whether the queue may hold a request that has not arrived yet."""
        return self._consumed and self._reachable and (self._checking or not self._empty)

    def expect(self, priority: int) -> None:
        """The queue is about to be consumed."""
        self.priority = priority
        # Not known to be empty: from here the level blocks lower ones until RabbitMQ has answered.
        self._consumed, self._reachable, self._empty, self._count_ready = True, True, False, None

    def attach(self, priority: int, count_ready: Callable[[], Awaitable[int | None]]) -> None:
        """The queue is consumed from now on."""
        self.expect(priority)
        self._count_ready = count_ready
        self._changed.set()

    def unreachable(self) -> None:
        """The queue is missing, or cannot be consumed."""
        self._reachable = False
        self._changed.set()

    def detach(self) -> None:
        """The queue is no longer consumed."""
        self._consumed, self._count_ready = False, None
        self._changed.set()

    def arrived(self) -> None:
        """A request of the queue has arrived. More may follow."""
        self._waiting += 1
        # A delivery proves that the queue has a leader.
        self._silent_checks = 0
        self._reachable, self._empty = True, False
        self._changed.set()

    def begun(self) -> None:
        """A request of the queue no longer waits: it runs, is set aside, or has left without a run."""
        self._waiting -= 1

    def settled(self) -> None:
        """A request of the queue has left this worker: RabbitMQ may deliver another one."""
        self._changed.set()

    async def check(self) -> None:
        """Ask RabbitMQ whether the queue is empty; if not, wait for a change, at most `DELIVERY_TIMEOUT`."""
        # Not while a request of the level waits in this worker: lower levels wait for it anyway.
        if self._waiting == 0 and self._count_ready is not None and await self._is_empty(self._count_ready):
            return
        await self._changed.wait(DELIVERY_TIMEOUT)

    async def _is_empty(self, count_ready: Callable[[], Awaitable[int | None]]) -> bool:
        """Ask RabbitMQ; True if the level no longer blocks. Deliveries that RabbitMQ has sent before its answer also
        arrive before it."""
        self._empty = True  # a delivery that arrives meanwhile changes this
        self._checking = True  # the level blocks until the answer arrives
        try:
            ready = await count_ready()
        except BrokerError:
            self._reachable = False
            # The intake opens the lost channel again, which may take long: lower levels do not wait for that.
            return True
        finally:
            self._checking = False
        self._silent_checks = self._silent_checks + 1 if ready is None else 0
        # A queue without a leader may stay so for minutes; lower levels must not wait for that.
        self._reachable = self._silent_checks < MAX_SILENT_CHECKS
        if ready != 0:
            # Unknown counts as not empty: a lower level may wait too long, and never runs too early.
            self._empty = False
        return self._empty or not self._reachable


class PriorityLevels:
    """All priority levels of a worker, one for each queue."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_queue: dict[QueueName, PriorityLevel] = {}

    def of(self, queue: QueueName) -> PriorityLevel:
        return self._by_queue.setdefault(queue, PriorityLevel(self._clock))

    def block(self, priority: int) -> bool:
        """Whether a level above `priority` may hold a request that has not arrived yet."""
        return any(level.blocks for level in self._by_queue.values() if level.priority < priority)

    async def check(self, priority: int) -> None:
        """Check the highest level that blocks `priority`."""
        blocking = [level for level in self._by_queue.values() if level.priority < priority and level.blocks]
        if blocking:
            # One at a time, the highest first: while it has requests, the other levels do not matter.
            await min(blocking, key=lambda level: level.priority).check()


@dataclass(slots=True, order=True)
class _Waiter:
    """A request that waits for a slot, or for all slots (`alone`). `events`: what it takes from the budget."""

    priority: int
    order: int
    """Of equal priorities, the waiter that came first is next."""
    granted: asyncio.Future[None] = field(compare=False)
    alone: bool = field(compare=False)
    events: int = field(compare=False)


class Slots:
    """The `size` slots in which requests run. The next waiter is the one with the highest priority (lowest number),
    among equals the first one.

    No waiter is granted a slot while a higher level may hold a request that has not arrived yet, or while the `budget`
    of events is used up. `spawn` starts the tasks that check the levels and wait for the budget.
    """

    def __init__(
        self,
        size: int,
        *,
        levels: PriorityLevels | None = None,
        spawn: Callable[[Coroutine[None, None, None]], object] | None = None,
        budget: EventBudget | None = None,
    ) -> None:
        self._size = self._free = size
        self._levels = levels
        self._spawn = spawn
        self._budget = budget
        self._checking = False
        """Whether a task checks the levels."""
        self._awaiting_budget = False
        """Whether a task waits for the budget."""
        self._waiting: list[_Waiter] = []
        self._order = count()

    @property
    def free(self) -> int:
        return self._free

    def try_acquire(self, priority: int = 0, *, events: int = 0) -> bool:
        """Take a slot if one is free, no request waits, no higher level blocks and the budget is not used up."""
        # With waiters the order of the heap decides: a new request must not overtake them.
        if self._free == 0 or self._waiting or self._budget_wait() or self._is_blocked(priority):
            return False
        self._free -= 1
        self._take_events(events)
        return True

    async def acquire(self, priority: int, *, events: int = 0) -> None:
        """Wait for a slot and take it. `events`: what the request takes from the budget."""
        if self.try_acquire(priority, events=events):
            return
        await self._wait(self._new_waiter(priority, events=events))

    async def acquire_again(self, priority: int) -> None:
        """Wait for a slot for a request that has begun, and has taken its events from the budget."""
        # Ahead of requests that wait for the budget, which cannot use the slot.
        is_limited = self._budget is not None and self._budget.rate is not None
        await self._wait(self._new_waiter(_BEGUN if is_limited else priority))

    async def acquire_all(self, priority: int, *, patience: float, events: int = 0) -> None:
        """Take all slots when no request of a higher priority waits. After `patience` seconds, the waiter is next."""
        waiter = self._new_waiter(priority, alone=True, events=events)
        timer = asyncio.get_running_loop().call_later(patience, self._promote, waiter)
        try:
            await self._wait(waiter)
        finally:
            timer.cancel()

    def release(self, *, all_slots: bool = False) -> None:
        self._free += self._size if all_slots else 1
        self._grant()

    def _new_waiter(self, priority: int, *, alone: bool = False, events: int = 0) -> _Waiter:
        return _Waiter(priority, next(self._order), asyncio.get_running_loop().create_future(), alone, events)

    async def _wait(self, waiter: _Waiter) -> None:
        heapq.heappush(self._waiting, waiter)
        self._grant()
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled():  # granted at the same time: pass the slot on
                self.release(all_slots=waiter.alone)
            else:
                # The waiter stays in the heap until it is the first one; `_grant` then drops it.
                waiter.granted.cancel()
                self._grant()
            raise

    def _promote(self, waiter: _Waiter) -> None:
        waiter.priority = _PROMOTED
        heapq.heapify(self._waiting)
        self._grant()

    def _budget_wait(self) -> float:
        return 0.0 if self._budget is None else self._budget.wait()

    def _take_events(self, events: int) -> None:
        if self._budget is not None and events:
            self._budget.take(events)

    async def _wait_for_budget(self) -> None:
        """Wait until the budget is not used up, or until no request waits for it."""
        try:
            while self._budget is not None and self._waiting and (wait := self._budget.wait()) > 0:
                await self._budget.changed.wait(wait)
        finally:
            self._awaiting_budget = False
        self._grant()

    def _is_blocked(self, priority: int) -> bool:
        return self._levels is not None and self._levels.block(priority)

    def _grant(self) -> None:
        """Grant free slots to waiters, in order, as long as no higher level blocks them."""
        while self._free and self._waiting:
            waiter = self._waiting[0]
            if waiter.granted.done():
                heapq.heappop(self._waiting)  # it was cancelled
            elif waiter.alone and self._free < self._size:
                # No waiter behind it gets a slot: otherwise all slots would never be free at once.
                return
            elif waiter.priority != _BEGUN and self._budget_wait():
                if not self._awaiting_budget and self._spawn is not None:
                    self._awaiting_budget = True
                    self._spawn(self._wait_for_budget())
                return
            elif self._is_blocked(waiter.priority):
                if not self._checking and self._spawn is not None:
                    self._checking = True
                    # One task at a time: it repeats the check for the waiter that is the first one then.
                    self._spawn(self._check_levels())
                return
            else:
                heapq.heappop(self._waiting)
                # Here and not when the waiter runs again: two grants in a row must not give the same slot.
                self._free -= self._size if waiter.alone else 1
                self._take_events(waiter.events)
                waiter.granted.set_result(None)

    async def _check_levels(self) -> None:
        """Check the levels that block the first waiter until none does; the first waiter may change meanwhile."""
        try:
            while self._free and self._waiting and self._levels and self._is_blocked(self._waiting[0].priority):
                await self._levels.check(self._waiting[0].priority)
        finally:
            self._checking = False
        self._grant()
