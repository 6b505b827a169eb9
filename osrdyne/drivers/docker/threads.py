"""Threads for calls that block: a few at once, and daemon ones.

So no caller has to wait for an engine that does not answer, and the process can end: for the threads of an
executor Python waits. Used by the Docker driver and by its pulls.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class Threads:
    """At most `limit` calls at once. An abandoned call keeps its place until it ends."""

    def __init__(self, name: str, *, limit: int) -> None:
        self._name = name
        self._free = asyncio.Semaphore(limit)
        self._running: set[threading.Thread] = set()

    async def run(self, function: Callable[[], T]) -> T:
        """What the function returns or raises."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                settle = partial(outcome.set_result, function())
            except Exception as error:
                settle = partial(outcome.set_exception, error)
            with suppress(RuntimeError):  # the loop is closed: the result is not needed
                loop.call_soon_threadsafe(end, settle)

        def end(settle: Callable[[], None]) -> None:
            self._running.discard(thread)
            self._free.release()
            if not outcome.done():
                settle()

        thread = threading.Thread(target=work, name=self._name, daemon=True)
        self._running.add(thread)
        thread.start()
        return await outcome

    def join(self, timeout: float) -> None:
        """Wait for the calls under way, `timeout` seconds in all at most. Blocks."""
        until = time.monotonic() + timeout
        for thread in list(self._running):
            thread.join(max(0.0, until - time.monotonic()))
