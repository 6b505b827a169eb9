"""A coalescing wake-up for one loop: many calls of `set` before the loop looks are one."""

from __future__ import annotations

import asyncio
from functools import partial

from osrdyne.aio.clock import Clock


class Wakeup:
    """Level, not edge: `wait` returns once something was set since the last `wait`, or when the time is over.

    One task waits, any number may set.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None:
            _resolve(self._waiter)

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait for `set`, at most `timeout` seconds (None: without limit). True when it was set."""
        if not self._is_set:
            if timeout is None or timeout > 0:
                await self._wait_at_most(timeout)
            else:
                await asyncio.sleep(0)
        was_set, self._is_set = self._is_set, False
        return was_set

    async def _wait_at_most(self, timeout: float | None) -> None:
        assert self._waiter is None, "another task waits already"
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        timer = None if timeout is None else self._clock.call_later(timeout, partial(_resolve, waiter))
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
