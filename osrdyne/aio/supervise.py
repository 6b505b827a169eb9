"""Supervision of endless tasks: every task has a name and an owner, and one that returns is a fault."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class TaskEndedError(RuntimeError):
    """An endless task has returned."""


async def endless(name: str, coroutine: Coroutine[Any, Any, None]) -> None:
    """Await a coroutine that must not return; raise `TaskEndedError` naming it when it does."""
    await coroutine
    raise TaskEndedError(f"The task {name!r} ended, but it must never end.")


def start_endless(group: asyncio.TaskGroup, name: str, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start an endless task in `group` under `name`."""
    return group.create_task(endless(name, coroutine), name=name)
