"""One line about an exception, for whoever waits for this worker: no traceback, no password, not too long."""

from __future__ import annotations

import traceback
from pathlib import Path

from osrdyne.errors import OsrdyneError
from osrdyne.logs import mask_uri

MAX_LINES = 2
"""py4j says what it did on the first line and what went wrong on the second."""
MAX_CHARS = 1000


def describe(error: BaseException) -> str:
    """Its type and what it says; our own errors speak for themselves."""
    if isinstance(error, OsrdyneError):
        return mask_uri(error.message)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:MAX_LINES])[:MAX_CHARS]
    return f"{type(error).__name__}: {mask_uri(text)}" if text else type(error).__name__


def describe_with_place(error: BaseException) -> str:
    """The same with the file and line where it was raised, for errors in an application's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, OsrdyneError) or not frames:
        return describe(error)
    return f"{describe(error)} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
