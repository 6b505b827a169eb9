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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from osrdyne.logs import get_logger
from osrdyne.protocol.activity import text_fingerprint
from osrdyne.protocol.names import WorkerId
from osrdyne_worker.app.app import Context
from osrdyne_worker.app.call import Call

TICKS = 20
"""How many times within the limit the thread pings the loop."""
MAX_FRAMES = 50
"""Frames of the stack in the log: the innermost ones."""
SHOWN_FRAMES = 2
"""Innermost frames in the sentence for callers, besides that of the handler."""

log = get_logger("watchdog")


async def on_loop(function: Callable[..., Any], *arguments: Any, context: Context, calls: Sequence[Call] = ()) -> Any:
    """Await a coroutine function of the application: a handler with the `calls` that it answers, or a hook.

    If it blocks the loop, the watchdog finds the parameters in this frame: nothing has to be recorded for each request.
    """
    return await function(*arguments)


@dataclass(frozen=True, slots=True)
class Blocked:
    """What blocks the loop. `stack`: its frames, outermost first. Other fields are None if `on_loop` does not run it;
    `path` and `text` (the text fingerprint) also if it is a hook, or the handler of several requests."""

    reason: str
    stack: tuple[str, ...]
    name: str | None = None
    key: str | None = None
    worker_id: WorkerId | None = None
    path: str | None = None
    text: str | None = None

    def log(self) -> None:
        # With key and worker id, so that the line belongs to the log of this worker of a shared process.
        known = {
            name: value for name in ("name", "path", "key", "worker_id") if (value := getattr(self, name)) is not None
        }
        log.error("event loop blocked", reason=self.reason, **known, frames=list(self.stack))


class LoopWatchdog:
    """Calls `on_blocked` in its own thread once the loop has been blocked for `limit` seconds.

    Time in which the whole process is stopped does not count.
    """

    def __init__(self, *, limit: float, on_blocked: Callable[[Blocked], None]) -> None:
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
                blocked = blocked_by(sys._current_frames().get(thread), limit=self._limit)
                try:
                    blocked.log()
                finally:
                    self._on_blocked(blocked)
                return

    def _pong(self) -> None:
        self._seen_at = time.monotonic()


def blocked_by(frame: FrameType | None, *, limit: float) -> Blocked:
    """Describe the code that occupies the thread of the loop, whose innermost frame is `frame`."""
    stack = [
        f"{line.name} ({line.filename}:{line.lineno})"
        for line in (traceback.extract_stack(frame, limit=None) if frame is not None else ())
    ]
    depth, entry = 0, frame
    while entry is not None and entry.f_code is not on_loop.__code__:
        depth, entry = depth + 1, entry.f_back
    if entry is None:
        reason = f"The event loop has been blocked for {limit:g} s, at {' > '.join(stack[-SHOWN_FRAMES - 1 :])}."
        return Blocked(reason, tuple(stack[-MAX_FRAMES:]))
    stack = stack[len(stack) - depth :]  # of the application only
    function, context, calls = (entry.f_locals[name] for name in ("function", "context", "calls"))
    name = getattr(function, "__qualname__", repr(function))
    [call] = calls if len(calls) == 1 else [None]
    what = f"the handler {name} of {calls[0].path!r}" if calls else f"the hook {name}"
    places = stack if len(stack) <= SHOWN_FRAMES + 1 else [stack[0], "…", *stack[-SHOWN_FRAMES:]]
    return Blocked(
        f"The event loop has been blocked for {limit:g} s by {what}, at {' > '.join(places)}. Make it a plain "
        "function, or await.",
        tuple(stack[-MAX_FRAMES:]),
        name,
        context.key,
        context.worker_id,
        None if call is None else call.path,
        None if call is None else text_fingerprint(call.path, call.body),
    )
