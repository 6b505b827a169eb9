"""Runs what may take long in a thread, so that the event loop goes on. Used for large manifests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

SMALL = 32 * 1024
"""Characters of a document that take less time on the loop than it takes to notice."""

P = ParamSpec("P")
T = TypeVar("T")


async def off_loop(size: int, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """The result of a function that touches nothing of the loop. `size` in characters says whether it takes long."""
    if size <= SMALL:
        return function(*arguments, **named)
    return await asyncio.to_thread(function, *arguments, **named)
