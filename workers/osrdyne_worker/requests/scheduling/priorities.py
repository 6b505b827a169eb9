"""Strict priority between the queues of a worker: which request runs next.

RabbitMQ delivers the next request of a queue only after the acknowledgement of the last one: for a moment a queue seems
empty that is not. So before a request of a lower level runs, the slots ask the queues of the higher levels
(`PriorityLevel`). A queue that is unreachable does not block lower levels.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Coroutine
from itertools import count

from osrdyne.aio.clock import Clock
from osrdyne.aio.signals import Wakeup
from osrdyne.errors import BrokerError
from osrdyne.protocol.names import QueueName
from osrdyne_worker.requests.scheduling.rates import EventBudget

DELIVERY_TIMEOUT = 0.5
"""Seconds to wait for a delivery that must be on its way, before the queue is asked again."""
MAX_SILENT_CHECKS = 6
"""How many checks in a row a queue may leave unanswered before lower levels go on without it."""

_BEGUN = -2
"""The place of requests that have begun and wait for a slot again: before those that were promoted."""


class PriorityLevel:
    """What is known about the queue of one priority level. Updated by its intake and by the requests of the queue.

    `count_ready` returns how many requests of the queue the processor has not received; None if unknown.
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
        """A request of the queue has arrived: there may be more behind it."""
        self._waiting += 1
        # A delivery proves that the queue has a leader, whatever its last answers were.
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
        """Ask RabbitMQ whether the queue is empty, or wait for a change at most `DELIVERY_TIMEOUT`."""
        # A request that waits here already proves that the queue is not empty: no question is needed.
        if self._waiting == 0 and self._count_ready is not None and await self._is_empty(self._count_ready):
            return
        await self._changed.wait(DELIVERY_TIMEOUT)

    async def _is_empty(self, count_ready: Callable[[], Awaitable[int | None]]) -> bool:
        """Whether there is nothing to wait for. A delivery before the answer has arrived before the answer."""
        self._empty = True  # until a delivery arrives
        self._checking = True  # the level blocks while the answer is outstanding
        try:
            ready = await count_ready()
        except BrokerError:
            self._reachable = False
            # The level no longer blocks: a channel that is lost is opened again by its intake, which may take long.
            return True
        finally:
            self._checking = False
        self._silent_checks = self._silent_checks + 1 if ready is None else 0
        # A queue without a leader may stay so for minutes; lower levels must not wait for that.
        self._reachable = self._silent_checks < MAX_SILENT_CHECKS
        if ready != 0:
            # Unknown counts as not empty: strict priority may delay a lower level, and never overtakes a higher one.
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
            # One at a time, the highest first: while it holds requests the answers of the others change nothing.
            await min(blocking, key=lambda level: level.priority).check()


class Slots:
    """`size` slots to run in. The waiter with the highest priority (lowest number) is next, then the longest waiting.

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
        self._pausing = False
        self._waiting: list[tuple[int, int, asyncio.Future[None], bool, int]] = []
        self._order = count()

    @property
    def free(self) -> int:
        return self._free

    def try_acquire(self, priority: int = 0, *, events: int = 0) -> bool:
        """Take a slot if one is free, no request waits, no higher level blocks and the budget is not used up."""
        # With waiters the order of the heap decides: a newcomer must not pass them.
        if self._free == 0 or self._waiting or self._budget_wait() or self._is_blocked(priority):
            return False
        self._free -= 1
        self._take_events(events)
        return True

    async def acquire(self, priority: int, *, events: int = 0) -> None:
        """Wait for a slot and take it. `events`: what the request takes from the budget."""
        if self.try_acquire(priority, events=events):
            return
        await self._wait_turn(priority, alone=False, events=events)

    async def acquire_again(self, priority: int) -> None:
        """Wait for a slot for a request that has begun: it has taken its events."""
        # Before those that wait for the budget: they cannot use the slot.
        is_limited = self._budget is not None and self._budget.rate is not None
        await self._wait_turn(_BEGUN if is_limited else priority, alone=False)

    async def acquire_all(self, priority: int, *, patience: float, events: int = 0) -> None:
        """Take all slots once no request goes first. After `patience` seconds the waiter goes before all others."""
        # Its own place in the order is drawn here, so that the timer can find the waiter again.
        timer = asyncio.get_running_loop().call_later(patience, self._promote, order := next(self._order))
        try:
            await self._wait_turn(priority, alone=True, order=order, events=events)
        finally:
            timer.cancel()

    def release(self, *, all_slots: bool = False) -> None:
        self._free += self._size if all_slots else 1
        self._grant()

    async def _wait_turn(self, priority: int, *, alone: bool, order: int | None = None, events: int = 0) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # The counter breaks ties: requests of one level run in the order in which they arrived.
        heapq.heappush(self._waiting, (priority, next(self._order) if order is None else order, turn, alone, events))
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # granted in the same moment: pass the slot on
                self.release(all_slots=alone)
            else:
                # The heap keeps the entry until it comes to the top; `_grant` drops what is done.
                turn.cancel()
                self._grant()
            raise

    def _promote(self, order: int) -> None:
        # Above every level: nothing arrives that could go before it any more.
        self._waiting = [(-1 if one[1] == order else one[0], *one[1:]) for one in self._waiting]
        heapq.heapify(self._waiting)
        self._grant()

    def _budget_wait(self) -> float:
        return 0.0 if self._budget is None else self._budget.wait()

    def _take_events(self, events: int) -> None:
        if self._budget is not None and events:
            self._budget.take(events)

    async def _wait_for_budget(self) -> None:
        """Wait until the budget is not used up, or nothing waits for it."""
        try:
            while self._budget is not None and self._waiting and (wait := self._budget.wait()) > 0:
                await self._budget.changed.wait(wait)
        finally:
            self._pausing = False
        self._grant()

    def _is_blocked(self, priority: int) -> bool:
        return self._levels is not None and self._levels.block(priority)

    def _grant(self) -> None:
        """Grant free slots to waiters, in order, as long as no higher level blocks them."""
        while self._free and self._waiting:
            priority, _, turn, alone, events = self._waiting[0]
            if turn.done():
                heapq.heappop(self._waiting)
            elif alone and self._free < self._size:
                # It stays at the head, and no waiter behind it is granted a slot: otherwise all slots would never be
                # free at once.
                return
            elif priority != _BEGUN and self._budget_wait():
                if not self._pausing and self._spawn is not None:
                    self._pausing = True
                    self._spawn(self._wait_for_budget())
                return
            elif self._is_blocked(priority):
                if not self._checking and self._spawn is not None:
                    self._checking = True
                    # One such task at a time: it repeats until the first waiter may run, whichever that is by then.
                    self._spawn(self._check_levels())
                return
            else:
                heapq.heappop(self._waiting)
                self._free -= self._size if alone else 1
                self._take_events(events)
                # The slot is taken before the waiter runs: two grants in a row never give the same slot.
                turn.set_result(None)

    async def _check_levels(self) -> None:
        """Check the levels that block the first waiter until none does; the first waiter may change meanwhile."""
        try:
            while self._free and self._waiting and self._levels and self._is_blocked(self._waiting[0][0]):
                await self._levels.check(self._waiting[0][0])
        finally:
            self._checking = False
        self._grant()
