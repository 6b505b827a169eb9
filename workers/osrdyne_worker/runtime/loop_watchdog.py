"""A thread that ends the worker when its event loop stands still, which nothing on the loop could do.

A coroutine handler that blocks stops everything of this process: answers, heartbeats, control messages, time-outs. It
is started once the worker takes requests; loading has a limit of its own.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable

TICKS = 20
"""How many times within the limit the loop is asked for a sign of life."""


class LoopWatchdog:
    """Calls `on_blocked` in its own thread, with a sentence that names the place, once the loop stands still for
    `limit` seconds. Time in which the whole process stands still does not count.
    """

    def __init__(self, *, limit: float, on_blocked: Callable[[str], None]) -> None:
        self._limit = limit
        self._on_blocked = on_blocked
        self._seen_at = 0.0

    def start(self) -> None:
        """Watch the running loop, until it is closed."""
        self._seen_at = time.monotonic()
        arguments = (asyncio.get_running_loop(), threading.get_ident())
        threading.Thread(target=self._watch, args=arguments, name="watchdog", daemon=True).start()

    def _watch(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        tick = self._limit / TICKS
        while not loop.is_closed():
            try:
                loop.call_soon_threadsafe(self._show_life)
            except RuntimeError:
                return  # closed just now
            before = time.monotonic()
            time.sleep(tick)
            now = time.monotonic()
            if now - before > tick + max(1.0, tick):
                self._seen_at = now  # the process stood still, or kept every thread waiting: what could the loop do
            if now - self._seen_at > self._limit:
                self._on_blocked(f"The event loop has been blocked for {self._limit:g} s, {_place(thread)}.")
                return

    def _show_life(self) -> None:
        self._seen_at = time.monotonic()


def _place(thread: int) -> str:
    """Where a thread is now: its innermost lines, outermost first."""
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame)[-3:] if frame is not None else []
    return "at " + " > ".join(f"{line.name} ({line.filename}:{line.lineno})" for line in stack)
