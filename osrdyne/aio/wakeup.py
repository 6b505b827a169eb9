"""A coalescing wake-up for one loop: many calls of `set` before the loop looks are one."""

from __future__ import annotations

import asyncio

from osrdyne.aio.clock import Clock


class Wakeup:
    """Level, not edge: `wait` returns once something was set since the last `wait`, or when the time is over."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait for `set`, at most `timeout` seconds (None: for ever). True when it was set."""
        if not self._event.is_set() and (timeout is None or timeout > 0):
            if timeout is None:
                await self._event.wait()
            else:
                await self._wait_at_most(timeout)
        elif not self._event.is_set():
            await asyncio.sleep(0)
        was_set = self._event.is_set()
        self._event.clear()
        return was_set

    async def _wait_at_most(self, timeout: float) -> None:
        event = asyncio.ensure_future(self._event.wait())
        timer = asyncio.ensure_future(self._clock.sleep(timeout))
        try:
            await asyncio.wait({event, timer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            event.cancel()
            timer.cancel()
