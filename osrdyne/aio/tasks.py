"""Tasks with an owner: endless tasks that must not return, and jobs in order per key."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


class TaskEndedError(RuntimeError):
    """An endless task has returned."""


async def endless(name: str, coroutine: Coroutine[Any, Any, None]) -> None:
    """Await a coroutine that must not return; raise `TaskEndedError` naming it when it does."""
    await coroutine
    raise TaskEndedError(f"The task {name!r} ended, but it must never end.")


def start_endless(group: asyncio.TaskGroup, name: str, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start an endless task in `group` under `name`."""
    return group.create_task(endless(name, coroutine), name=name)


class KeyedJobs(Generic[K, T]):
    """Passes items of one key to `work` one after the other, in the order given, and items of different keys
    concurrently.

    A key has a task only while it has items. The tasks belong to the given group: `work` that raises brings it down.
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

    async def _run(self, key: K) -> None:
        queue = self._queues[key]
        while queue:
            await self._work(queue[0])
            queue.popleft()
        del self._queues[key]
