"""The clock that components get as a parameter, so that tests can control the time, and delays between attempts."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Timer(Protocol):
    """A scheduled callback."""

    def cancel(self) -> None:
        """Cancel the callback; no-op if it already ran."""
        ...


class Clock(Protocol):
    """The source of time of every component."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back; only differences have a meaning."""
        ...

    def time(self) -> float:
        """Seconds since the epoch; may jump. Only for values that other machines read: deadlines and timestamps."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`; zero or less only yields to other tasks."""
        ...

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` once, after `seconds`, without a task."""
        ...


class SystemClock:
    """The clocks of the machine and the event loop."""

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
    """Sleep until `at_ms`, in milliseconds since the epoch."""
    await clock.sleep(at_ms / 1000 - clock.time())


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays `initial`, `initial * factor`, … up to `maximum` seconds, each spread by ± `jitter` (a share)."""

    initial: float = 0.5
    factor: float = 2.0
    maximum: float = 30.0
    jitter: float = 0.1

    def delay(self, failures: int, *, spread: Callable[[], float] = random.random) -> float:
        """Seconds to wait after `failures` failures in a row (≥ 1)."""
        exponent = min(max(failures, 1) - 1, 32)
        delay = min(self.maximum, self.initial * self.factor**exponent)
        return delay * (1 + self.jitter * (2 * spread() - 1))
