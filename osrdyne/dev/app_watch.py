"""Watches the files of the application in `osrdyne dev`: after a change its workers are replaced.

Only an application in the working directory is watched, not an installed one. `cli.daemon.dev` starts the watch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

from osrdyne.aio.clock import Clock
from osrdyne.errors import ConfigurationError

INTERVAL = 1.0
"""Seconds between two looks at the files. An editor that writes several files has this time for them."""

Files = Mapping[Path, tuple[int, int]]
"""Modification time in nanoseconds and size of each file."""


def files_of(app: str, directory: Path) -> Files:
    """The source files of `module:attribute` in a directory: those of its package, or those beside its module. Empty
    for an installed module."""
    top = app.partition(":")[0].partition(".")[0]
    if (directory / top).is_dir():
        found = (directory / top).rglob("*.py")
    elif (directory / f"{top}.py").is_file():
        found = directory.glob("*.py")
    else:
        return {}
    states = {}
    for path in found:
        with suppress(OSError):  # removed meanwhile
            status = path.stat()
            states[path] = (status.st_mtime_ns, status.st_size)
    return states


async def watch_app(
    read: Callable[[], Files],
    *,
    check: Callable[[], None],
    replace: Callable[[], Awaitable[None]],
    report: Callable[[str], None],
    clock: Clock,
) -> None:
    """Call `replace` after each change of the files, once they rest. Runs until cancelled.

    `check` raises `ConfigurationError` if the application cannot be used: then the present workers stay. `read` and
    `check` run in a thread.
    """
    seen = await asyncio.to_thread(read)
    while True:
        await clock.sleep(INTERVAL)
        now = await asyncio.to_thread(read)
        if now == seen:
            continue
        while (seen := now) != (now := await _later(read, clock)):
            pass
        try:
            await asyncio.to_thread(check)
        except ConfigurationError as error:
            report(f"The application has changed, and its workers stay as they are: {error.message}")
            continue
        await replace()
        report("The application has changed: its workers are replaced, each after its requests.")


async def _later(read: Callable[[], Files], clock: Clock) -> Files:
    await clock.sleep(INTERVAL)
    return await asyncio.to_thread(read)
