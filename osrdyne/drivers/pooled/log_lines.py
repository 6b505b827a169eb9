"""The lines of one worker in the log of a process that the workers of several keys share. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from osrdyne.protocol.names import WorkerId

_FIELD = "worker_id"
MAX_SEARCHED = 10_000
"""The maximum number of the last lines of a process that are searched for those of a worker."""
_SEARCHED_FOR_ONE = 50


def lines_to_search(wanted: int) -> int:
    """The number of lines of a process that are read for the `wanted` last lines of one of its workers."""
    return min(wanted * _SEARCHED_FOR_ONE, MAX_SEARCHED)


def lines_of_worker(lines: Sequence[str], worker_id: WorkerId) -> tuple[str, ...]:
    """The log events that name the worker. A line without a worker may be of any key, so it is left out: output of
    `print`, of the JVM and of native code."""
    # The search for the id costs less than the parser, which most lines then do not need.
    return tuple(line for line in lines if worker_id in line and _worker_of(line) == worker_id)


def _worker_of(line: str) -> object:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event.get(_FIELD) if isinstance(event, dict) else None
