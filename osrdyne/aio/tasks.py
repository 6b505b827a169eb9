"""Tasks with an owner: endless tasks that must not return, and jobs in order per key."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

K = TypeVar("K")


class TaskEndedError(RuntimeError):
    """An endless task has returned."""


async def endless(name: str, coroutine: Coroutine[Any, Any, None]) -> None:
    """Await a coroutine that must not return; raise `TaskEndedError` naming it when it does."""
    await coroutine
    raise TaskEndedError(f"The task {name!r} ended, but it must never end.")


def start_endless(group: asyncio.TaskGroup, name: str, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start an endless task in `group` under `name`."""
    return group.create_task(endless(name, coroutine), name=name)


Job = Callable[[], Awaitable[None]]


class KeyedJobs(Generic[K]):
    """Runs jobs of one key one after the other, in the order given, and jobs of different keys concurrently.

    A key has a task only while it has jobs. The tasks belong to the given group: a job that raises brings it down.
    """

    def __init__(self, group: asyncio.TaskGroup, name: str) -> None:
        self._group = group
        self._name = name
        self._queues: dict[K, deque[Job]] = {}

    def submit(self, key: K, job: Job) -> None:
        queue = self._queues.get(key)
        if queue is not None:
            queue.append(job)
            return
        self._queues[key] = deque([job])
        self._group.create_task(self._run(key), name=f"{self._name} {key!r}")

    async def _run(self, key: K) -> None:
        queue = self._queues[key]
        while queue:
            await queue[0]()
            queue.popleft()
        del self._queues[key]
