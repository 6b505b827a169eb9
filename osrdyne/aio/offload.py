"""Runs what may take long in a thread, so that the event loop goes on. Used for large manifests."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

SMALL = 32 * 1024
"""Characters of a document that take less time on the loop than it takes to notice."""

P = ParamSpec("P")
T = TypeVar("T")

_lock = threading.Lock()
_pauses = 0


async def off_loop(size: int, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """The result of a function that touches nothing of the loop. `size` in characters says whether it takes long."""
    if size <= SMALL:
        return function(*arguments, **named)

    def run() -> T:
        with _collector_paused():
            return function(*arguments, **named)

    return await asyncio.to_thread(run)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Without the collector of cyclic garbage. It holds the interpreter, and with it the loop, while it looks through
    all objects, again and again as a large document grows: half of the work, and the longest pause of the loop."""
    global _pauses
    with _lock:
        _pauses += 1
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0:
                gc.enable()
