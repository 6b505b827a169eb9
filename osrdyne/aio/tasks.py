"""Tasks and threads: endless tasks, limits for waiting, jobs in order per key, slow functions, and blocking calls."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

K = TypeVar("K")
P = ParamSpec("P")
T = TypeVar("T")

SMALL = 32 * 1024  # Characters of a document that is processed faster on the event loop than in a thread.

_pauses_lock = threading.Lock()
_pauses = 0


class TaskEndedError(RuntimeError):
    """An endless task has returned."""


async def endless(name: str, coroutine: Coroutine[Any, Any, None]) -> None:
    """Await a coroutine that must not return; raise `TaskEndedError` naming it when it does."""
    await coroutine
    raise TaskEndedError(f"The task {name!r} ended, but it must never end.")


def start_endless(group: asyncio.TaskGroup, name: str, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start an endless task in `group` under `name`."""
    task = group.create_task(endless(name, coroutine), name=name)
    task.add_done_callback(lambda _: coroutine.close())  # for a task that is cancelled before its first step
    return task


async def at_most(seconds: float, coroutine: Coroutine[Any, Any, Any]) -> None:
    """Await `coroutine`, and cancel it after `seconds`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await coroutine


async def first_of(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Await the first of `coroutines`, and cancel the others. Raises its exception."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()


class KeyedJobs(Generic[K, T]):
    """Passes the items of one key to `work` one after the other, in the order of submission, and those of different
    keys concurrently.

    A key has a task only while it has items. The tasks belong to the given group: an exception of `work` ends it.
    """

    def __init__(self, group: asyncio.TaskGroup, name: str, work: Callable[[T], Awaitable[None]]) -> None:
        self._group = group
        self._name = name
        self._work = work
        self._queues: dict[K, deque[T]] = {}

    def submit(self, key: K, item: T) -> None:
        queue = self._queues.get(key)
        if queue is not None:
            queue.append(item)
            return
        self._queues[key] = deque([item])
        self._group.create_task(self._run(key), name=f"{self._name} {key!r}")

    def withdraw(self, key: K, item: T) -> bool:
        """Remove an item that waits behind others; False if `work` has begun with it, or has ended."""
        queue = self._queues.get(key, deque())
        try:
            del queue[queue.index(item, 1)]
        except ValueError:
            return False
        return True

    def is_busy(self, key: K) -> bool:
        """Whether the key has items in progress or waiting."""
        return key in self._queues

    async def _run(self, key: K) -> None:
        queue = self._queues[key]
        while queue:
            await self._work(queue[0])
            # Removed after the work: until then `submit` starts no second task for the key.
            queue.popleft()
        del self._queues[key]


async def off_loop(size: int, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call a function that uses nothing of the event loop; in a thread if `size` (in characters) makes it slow."""
    if size <= SMALL:
        return function(*arguments, **named)

    def run() -> T:
        with collector_paused():
            return function(*arguments, **named)

    return await asyncio.to_thread(run)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector of the whole process."""
    global _pauses
    # While a large document is parsed, the collector visits all objects again and again, and blocks the event loop for
    # that time: half of the work, and the longest pause of the loop.
    with _pauses_lock:
        _pauses += 1
        gc.disable()
    try:
        yield
    finally:
        with _pauses_lock:
            _pauses -= 1
            if _pauses == 0:
                gc.enable()


class Threads:
    """Runs blocking calls in daemon threads, at most `limit` at once. A call counts until it ends, even if its caller
    was cancelled.

    Unlike the threads of an executor, daemon threads do not keep the process from exiting while a service hangs.
    """

    def __init__(self, name: str, *, limit: int) -> None:
        self._name = name
        self._free = asyncio.Semaphore(limit)
        self._running: set[threading.Thread] = set()

    async def run(self, function: Callable[[], T]) -> T:
        """Return the result of the function, or raise its exception."""
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
        try:
            thread.start()
        except BaseException:  # the process may have no more threads: nothing would call `end`
            self._running.discard(thread)
            self._free.release()
            raise
        return await outcome

    def join(self, timeout: float) -> None:
        """Wait for the calls in progress, at most `timeout` seconds in all. Blocks."""
        until = time.monotonic() + timeout
        for thread in list(self._running):
            thread.join(max(0.0, until - time.monotonic()))
