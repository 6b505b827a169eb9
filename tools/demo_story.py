"""Shared parts of the demos: console, chapters, checks, and failures in one line."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from rich.console import Console

from osrdyne.client import AsyncClient, Reply
from osrdyne.errors import OsrdyneError
from osrdyne.logs import configure_logging

START_LIMIT = 240.0
"""Seconds that a request may wait for its answer, the start of a Spark worker included."""

console = Console(highlight=False, width=110)


class DemoError(Exception):
    """A step did not do what the demo describes."""


def check(condition: bool, expectation: str) -> None:
    if not condition:
        raise DemoError(expectation)


def chapter(title: str) -> None:
    console.print(f"\n[bold]{title}[/bold]")


def tell(text: str) -> None:
    console.print(f"  {text}")


@asynccontextmanager
async def timed(what: str) -> AsyncIterator[None]:
    """Print how long the block took."""
    started = time.perf_counter()
    try:
        yield
    finally:
        tell(f"{what}: {time.perf_counter() - started:.1f} s")


async def ask(client: AsyncClient, key: str, query: str) -> Reply:
    """Send a query to the SQL pipeline of this key."""
    return await client.call(key, "/sql", json.dumps({"query": query}).encode(), timeout=START_LIMIT)


def run_demo(story: Coroutine[Any, Any, None]) -> int:
    """Run a demo and return its exit code. A failure becomes one line; a traceback helps no user."""
    configure_logging(level="error")
    logging.disable(logging.CRITICAL)
    try:
        asyncio.run(story)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        console.print(f"\n[red]The demo failed:[/red] {reason(error)}")
        return 1
    return 0


def reason(error: BaseException) -> str:
    """The first error inside the groups that task groups put around it, as one text."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, DemoError | OsrdyneError):
        return str(error)
    # Of other errors, the text alone may say nothing: that of a KeyError is only the key.
    return f"{type(error).__name__}: {error}".removesuffix(": ")
