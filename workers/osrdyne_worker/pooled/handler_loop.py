"""The event loop of one key in a pooled process: its coroutine functions run here, in a thread of their own.

A coroutine that blocks then stops only the coroutines of its own key. The worker itself, with its answers, deadlines
and heartbeats, runs on the event loop of the process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from osrdyne_worker.app.errors import describe
from osrdyne_worker.requests.dispatch import HandlerExitError
from osrdyne_worker.runtime.loop_watchdog import Blocked, LoopWatchdog

T = TypeVar("T")


class HandlerLoop:
    """Runs coroutines in its thread, which starts with the first one.

    `enter` is called first in the thread, and `on_blocked` once, in another thread, when the loop has been blocked.
    """

    def __init__(self, *, enter: Callable[[], None], on_blocked: Callable[[Blocked], None]) -> None:
        self._enter = enter
        self._on_blocked = on_blocked
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_watched = False
        self._running: set[Future[Any]] = set()

    @property
    def running(self) -> int:
        """How many coroutines have not ended."""
        return len(self._running)

    async def run(self, coroutine: Coroutine[Any, Any, T], *, blocked_timeout: float | None = None) -> T:
        """Run a coroutine and wait until it has ended. If this is cancelled, the coroutine is cancelled, and may take
        long to end, or not end at all. With `blocked_timeout` the loop is watched from now on."""
        loop = self._started()
        if blocked_timeout is not None and not self._is_watched:
            self._is_watched = True
            watchdog = LoopWatchdog(limit=blocked_timeout, on_blocked=self._on_blocked)
            loop.call_soon_threadsafe(watchdog.start)
        ended: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = loop.create_task(_without_exit(coroutine))
            tasks.append(task)
            task.add_done_callback(lambda _: _settle(ended, task))

        self._running.add(ended)
        ended.add_done_callback(self._running.discard)
        loop.call_soon_threadsafe(begin)  # with the context of this task: its log lines belong to the key
        waiting = asyncio.wrap_future(ended)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if not waiting.done():
                loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                await asyncio.wait({waiting})
            return waiting.result()

    def close(self) -> None:
        """End the thread once its coroutine has returned to the loop. Does not wait; may be called more than once."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._serve, args=(self._loop,), name="handler-loop", daemon=True).start()
        return self._loop

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        self._enter()
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()


async def _without_exit(coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        # It would end the loop.
        raise HandlerExitError(f"The handler ended with {describe(error)}.") from None


def _settle(ended: Future[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        ended.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        ended.set_exception(error)
    else:
        ended.set_result(task.result())
