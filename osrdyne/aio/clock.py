"""Time as a collaborator, so that tests can own it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """Something that is to happen later."""

    def cancel(self) -> None:
        """Cancel the callback; no-op if it already ran."""
        ...


class Clock(Protocol):
    """Where every component gets its time from."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back; only differences mean something."""
        ...

    def time(self) -> float:
        """Seconds since the epoch; may jump. Only for what crosses machines: deadlines and timestamps."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Let `seconds` pass; zero or less only yields."""
        ...

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call it once, after `seconds`. It needs no task, so the caller may wait for something else meanwhile."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, callback)


def now_ms(clock: Clock) -> int:
    """Milliseconds since the epoch."""
    return int(clock.time() * 1000)


async def sleep_until(at_ms: int, clock: Clock) -> None:
    """Let the time pass until `at_ms`, milliseconds since the epoch."""
    await clock.sleep(at_ms / 1000 - clock.time())
