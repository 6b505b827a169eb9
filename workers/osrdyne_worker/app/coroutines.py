"""Where the coroutine functions of an application run: on the event loop of the worker, or of their key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

RunCoroutine = Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]
"""Runs a coroutine, and ends when it has ended, also if it is cancelled."""


async def run_here(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it on the present event loop."""
    return await coroutine
