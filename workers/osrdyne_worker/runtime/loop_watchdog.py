"""A thread that makes the worker exit when its event loop is blocked: no task on the loop could do that.

A coroutine handler that blocks stops everything in this process: answers, heartbeats, control messages, time-outs. The
worker starts the watchdog once it is ready; loading has a limit of its own.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable

TICKS = 20
"""How many times within the limit the thread pings the loop."""


class LoopWatchdog:
    """Calls `on_blocked` in its own thread once the loop has been blocked for `limit` seconds.

    The argument is a sentence that names the blocking line. Time in which the whole process is stopped does not count.
    """

    def __init__(self, *, limit: float, on_blocked: Callable[[str], None]) -> None:
        self._limit = limit
        self._on_blocked = on_blocked
        self._seen_at = 0.0

    def start(self) -> None:
        """Watch the running loop until it is closed."""
        self._seen_at = time.monotonic()
        arguments = (asyncio.get_running_loop(), threading.get_ident())
        threading.Thread(target=self._watch, args=arguments, name="watchdog", daemon=True).start()

    def _watch(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        tick = self._limit / TICKS
        while not loop.is_closed():
            try:
                loop.call_soon_threadsafe(self._pong)
            except RuntimeError:
                return  # the loop was closed meanwhile
            before = time.monotonic()
            time.sleep(tick)
            now = time.monotonic()
            if now - before > tick + max(1.0, tick):
                # The process was stopped, or no thread got processor time: the loop is not to blame.
                self._seen_at = now
            if now - self._seen_at > self._limit:
                self._on_blocked(f"The event loop has been blocked for {self._limit:g} s, {_position(thread)}.")
                return

    def _pong(self) -> None:
        self._seen_at = time.monotonic()


def _position(thread: int) -> str:
    """The innermost lines of a thread, outermost first."""
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame)[-3:] if frame is not None else []
    return "at " + " > ".join(f"{line.name} ({line.filename}:{line.lineno})" for line in stack)
