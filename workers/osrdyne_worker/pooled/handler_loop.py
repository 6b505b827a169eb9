"""The event loop of one key in a pooled process: its coroutine functions run here, in a thread of their own.

A coroutine that blocks then stops only the coroutines of its own key. The worker itself, with its answers, deadlines
and heartbeats, runs on the event loop of the process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from osrdyne_worker.app.errors import describe
from osrdyne_worker.requests.dispatch import HandlerExitError
from osrdyne_worker.runtime.loop_watchdog import Blocked, LoopWatchdog

T = TypeVar("T")

CLOSED = "The worker of this key has ended: it runs no more coroutines."


class HandlerLoop:
    """Runs coroutines in its thread, which starts with the first one.

    `enter` is called first in the thread; if it fails, so does the coroutine, and the next one starts another thread.
    `on_blocked` is called in another thread when the loop has been blocked.
    """

    def __init__(self, *, enter: Callable[[], None], on_blocked: Callable[[Blocked], None]) -> None:
        self._enter = enter
        self._on_blocked = on_blocked
        self._loop: asyncio.AbstractEventLoop | None = None
        self._entered: Future[None] | None = None
        """Of the present thread."""
        self._is_closed = False
        self._is_watched = False
        self._running: set[Future[Any]] = set()

    @property
    def running(self) -> int:
        """How many coroutines have not ended."""
        return len(self._running)

    async def run(self, coroutine: Coroutine[Any, Any, T], *, blocked_timeout: float | None = None) -> T:
        """Run a coroutine and wait until it has ended. If this is cancelled, the coroutine is cancelled, and may take
        long to end, or not end at all. With `blocked_timeout` the loop is watched from now on.

        Raises what `enter` raises, and `RuntimeError` after `close`: the coroutine has not begun then.
        """
        try:
            loop = await self._started()
        except BaseException:
            coroutine.close()
            raise
        if blocked_timeout is not None and not self._is_watched:
            self._is_watched = True
            watchdog = LoopWatchdog(limit=blocked_timeout, on_blocked=self._end_of_watchdog)
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
                with suppress(RuntimeError):  # the loop is closed: the coroutine has ended
                    loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                await asyncio.wait({waiting})
            return waiting.result()

    def close(self) -> None:
        """End the thread once its coroutine has returned to the loop. Does not wait; may be called more than once."""
        self._is_closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def _started(self) -> asyncio.AbstractEventLoop:
        if self._is_closed:
            raise RuntimeError(CLOSED)
        if self._loop is None or self._entered is None or self._loop.is_closed():
            self._loop, self._entered = asyncio.new_event_loop(), Future()
            arguments = (self._loop, self._entered)
            threading.Thread(target=self._serve, args=arguments, name="handler-loop", daemon=True).start()
        loop, entered = self._loop, self._entered
        if not entered.done():
            await asyncio.shield(asyncio.wrap_future(entered))
        entered.result()
        if self._is_closed:  # meanwhile
            raise RuntimeError(CLOSED)
        return loop

    def _end_of_watchdog(self, blocked: Blocked) -> None:
        # First: if the worker goes on, its next coroutine starts another one.
        self._is_watched = False
        self._on_blocked(blocked)

    def _serve(self, loop: asyncio.AbstractEventLoop, entered: Future[None]) -> None:
        try:
            self._enter()
        except BaseException as error:
            loop.close()
            entered.set_exception(error)
            return
        asyncio.set_event_loop(loop)
        entered.set_result(None)
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
