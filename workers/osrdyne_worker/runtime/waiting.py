"""Wait for coroutines with a limit, and say why a group of tasks has lost RabbitMQ."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from osrdyne.errors import BrokerError


async def at_most(seconds: float, coroutine: Coroutine[Any, Any, Any]) -> None:
    """Await `coroutine`; cancel it after `seconds`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await coroutine


async def first_of(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Await the first of `coroutines`; cancel the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def loss_of(group: BaseExceptionGroup[BrokerError]) -> str:
    """Why the connection was lost: the first error of the tasks that used it."""
    first = group.exceptions[0]
    return loss_of(first) if isinstance(first, BaseExceptionGroup) else first.message
