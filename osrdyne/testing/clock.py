"""A clock for tests: time passes only when a test advances it, and everything that is due runs in order.

Components get it instead of a `SystemClock`. It does not affect asyncio's own timers: `asyncio.sleep`,
`asyncio.timeout` and threads still use the machine's time.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from osrdyne.testing.fakes.loop import MemoryLoop

_MAX_ROUNDS = 100_000


@dataclass(slots=True, eq=False)
class VirtualTimer:
    """A callback that is due at a time; None after it was cancelled."""

    callback: Callable[[], None] | None

    def cancel(self) -> None:
        self.callback = None


class VirtualClock:
    """Implements `osrdyne.aio.clock.Clock`. Both of its clocks start at fixed values."""

    def __init__(self, *, monotonic: float = 1_000.0, time: float = 1_700_000_000.0) -> None:
        self._now = monotonic
        self._epoch_offset = time - monotonic
        self._order = itertools.count()
        self._timers: list[tuple[float, int, VirtualTimer]] = []

    def monotonic(self) -> float:
        return self._now

    def time(self) -> float:
        return self._now + self._epoch_offset

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        timer = self.call_later(seconds, partial(_resolve, future))
        try:
            await future
        finally:
            timer.cancel()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> VirtualTimer:
        timer = VirtualTimer(callback)
        heapq.heappush(self._timers, (self._now + seconds, next(self._order), timer))
        return timer

    @property
    def pending(self) -> list[float]:
        """Seconds until each timer and sleeper is due, in order, without cancelled ones."""
        return sorted(due - self._now for due, _, timer in self._timers if timer.callback is not None)

    async def settle(self) -> None:
        """Let every task run until all of them wait.

        Raises `RuntimeError` if they never do (a loop that spins without waiting).
        """
        loop = asyncio.get_running_loop()
        if isinstance(loop, MemoryLoop):
            return await loop.settled()
        for _ in range(_MAX_ROUNDS):
            await asyncio.sleep(0)
            # The queue of ready callbacks; asyncio has no public way to check whether it is empty.
            if not loop._ready:  # type: ignore[attr-defined]
                return
        raise RuntimeError(f"The tasks did not settle in {_MAX_ROUNDS} rounds: one of them spins without waiting.")

    async def advance(self, seconds: float) -> None:
        """Let `seconds` pass: wake each sleeper at its time, in order, and settle each time.

        A sleeper that sleeps again within this time is woken again, as often as it is due.
        """
        target = self._now + seconds
        await self.settle()
        while self._timers and self._timers[0][0] <= target:
            self._now = max(self._now, self._timers[0][0])
            self._wake_due()
            await self.settle()
        self._now = target

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an administrator or NTP would; the monotonic clock does not move."""
        self._epoch_offset += seconds

    def _wake_due(self) -> None:
        while self._timers and self._timers[0][0] <= self._now:
            _, _, timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                timer.callback()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
