"""An event loop without sockets, threads and time, for tests with a `VirtualClock`.

Tests run thousands of histories on it. It runs tasks in the same order as asyncio's own loops, makes no system calls,
and detects when no task is ready, so that `VirtualClock.settle` need not poll. Its timers never fire, so that
`asyncio.sleep` and `asyncio.timeout` never end.
"""

from __future__ import annotations

import asyncio
from asyncio.events import _get_running_loop, _set_running_loop
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, copy_context
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

_MAX_ROUNDS = 100_000


class MemoryLoop(asyncio.BaseEventLoop):
    """Runs one coroutine after another to its end. `unfinished`: the tasks that the last one has left."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: deque[tuple[Callable[..., object], tuple[Any, ...], Context]] = deque()
        self._settlers: deque[asyncio.Future[None]] = deque()
        self._tasks: list[asyncio.Task[Any]] = []
        self.create_future = partial(asyncio.Future, loop=self)  # type: ignore[method-assign]

    def run_until_complete(self, future: Coroutine[Any, Any, T]) -> T:  # type: ignore[override]
        """Run a coroutine and return its result. Raises `RuntimeError` if all tasks wait without end, or one spins."""
        self._tasks.clear()
        main = self.create_task(future)
        main._log_destroy_pending = False  # type: ignore[attr-defined]  # the caller gets an error instead
        _set_running_loop(self)
        try:
            while not main.done():
                self._run_ready()
                if not main.done():
                    self._wake_settler()
        finally:
            _set_running_loop(None)
            self._steps.clear()
            self._settlers.clear()
        return main.result()

    def unfinished(self) -> list[asyncio.Task[Any]]:
        return [task for task in self._tasks if not task.done()]

    def settled(self) -> asyncio.Future[None]:
        """A future that is done when no task is ready. Of several such futures one is done at a time."""
        future: asyncio.Future[None] = self.create_future()
        self._settlers.append(future)
        return future

    def _run_ready(self) -> None:
        steps = self._steps
        for _ in range(_MAX_ROUNDS):
            if not steps:
                return
            for _ in range(len(steps)):
                callback, arguments, context = steps.popleft()
                context.run(callback, *arguments)
        raise RuntimeError(f"The tasks did not settle in {_MAX_ROUNDS} rounds: one of them spins without waiting.")

    def _wake_settler(self) -> None:
        while self._settlers:
            settler = self._settlers.popleft()
            if not settler.done():
                return settler.set_result(None)
        raise RuntimeError("Every task waits, and no timer is left.")

    # --- the interface for asyncio

    def is_running(self) -> bool:
        return _get_running_loop() is self

    def time(self) -> float:
        """Always 0."""
        return 0.0

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        task = asyncio.Task(coro, loop=self, name=None if name is None else str(name), context=context)
        self._tasks.append(task)
        return task

    def call_soon(
        self, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> Any:
        """Schedule a callback. Returns no handle: asyncio's tasks and futures do not use it."""
        self._steps.append((callback, args, copy_context() if context is None else context))

    def call_at(
        self, when: float, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return asyncio.TimerHandle(when, callback, args, self, context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: timers never fire."""
