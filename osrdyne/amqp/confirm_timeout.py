"""The limit for one confirm: it ends who waits when the broker is silent for too long without having blocked us."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

STEPS = 10
"""Looks within the limit: silence before a block and after it is not added up, and one look may come late."""


class SilenceLimit:
    """`with SilenceLimit(seconds, is_blocked):` raises `TimeoutError` out of the await inside.

    It costs a timer and no task, because every publish is under one. While `is_blocked()`, the time stands still, and
    after that it begins anew.
    """

    def __init__(self, seconds: float, is_blocked: Callable[[], bool]) -> None:
        self._step = seconds / STEPS
        self._is_blocked = is_blocked
        self._steps_of_silence = 0
        self._expired = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "only a task can be ended"
        self._task = task
        self._cancelling = task.cancelling()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._step, self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._expired and self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError):
            raise TimeoutError from error

    def _look(self) -> None:
        self._steps_of_silence = 0 if self._is_blocked() else self._steps_of_silence + 1
        if self._steps_of_silence >= STEPS:
            self._expired = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(self._step, self._look)
