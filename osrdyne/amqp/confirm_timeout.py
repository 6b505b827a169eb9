"""A time-out that does not run while RabbitMQ blocks the connection.

Used for publisher confirms, and by the leader for its token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from osrdyne.aio.clock import Timer

STEPS = 10  # Polls of `is_blocked` within the time-out.


class ConfirmTimeout:
    """`with ConfirmTimeout(seconds, is_blocked):` raises `TimeoutError` out of the await inside.

    It needs a timer and no task, because every publish uses one. While `is_blocked()` is true the time does not run;
    after that it starts again from zero. `call_later`: of a clock; by default of the event loop.
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
        # Cancellations that the caller requested before; they pass through.
        self._cancelling = task.cancelling()
        self._timer = self._call_later(self._step, self._poll)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        # As in `asyncio.timeout`: only the cancellation by `_poll` becomes a TimeoutError.
        if self._expired and self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError):
            raise TimeoutError from error

    def _poll(self) -> None:
        # The time starts again after a block: RabbitMQ may read earlier publishes only then.
        self._silent_steps = 0 if self._is_blocked() else self._silent_steps + 1
        if self._silent_steps >= STEPS:
            self._expired = True
            self._task.cancel()
        else:
            self._timer = self._call_later(self._step, self._poll)
