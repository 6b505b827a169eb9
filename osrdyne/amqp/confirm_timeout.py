"""The time-out of a publish, which stands still while RabbitMQ blocks the connection.

Used for publisher confirms, and by the leader for its token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from osrdyne.aio.clock import Timer

# Polls within the time-out: silence before a block and after it is not added up, and one poll may come late.
STEPS = 10


class ConfirmTimeout:
    """`with ConfirmTimeout(seconds, is_blocked):` raises `TimeoutError` out of the await inside.

    It costs a timer and no task, because every publish runs under one. While `is_blocked()` is true the time stands
    still; it starts again from zero after that. `call_later`: that of a clock; by default that of the event loop.
    """

    def __init__(
        self,
        seconds: float,
        is_blocked: Callable[[], bool],
        *,
        call_later: Callable[[float, Callable[[], None]], Timer] | None = None,
    ) -> None:
        self._step = seconds / STEPS
        self._is_blocked = is_blocked
        self._call_later = call_later or asyncio.get_running_loop().call_later
        self._silent_steps = 0
        self._expired = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "only a task can be cancelled"
        self._task = task
        # Cancellations that were requested before: they are of the caller, and are passed on.
        self._cancelling = task.cancelling()
        self._timer = self._call_later(self._step, self._poll)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        # As `asyncio.timeout` does it: only a cancellation of our own becomes a TimeoutError.
        if self._expired and self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError):
            raise TimeoutError from error

    def _poll(self) -> None:
        # A block starts the time anew: what was published before it may be read only after it.
        self._silent_steps = 0 if self._is_blocked() else self._silent_steps + 1
        if self._silent_steps >= STEPS:
            self._expired = True
            self._task.cancel()
        else:
            self._timer = self._call_later(self._step, self._poll)
