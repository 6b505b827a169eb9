"""Decides which part of the log a replay stores in a table: offsets, or times that stand for offsets. No Spark.

Source: docs/how-to/replay-telemetry.md.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from osrdyne.errors import OsrdyneError
from osrdyne.telemetry.times import parse_time
from osrdyne_worker.pipelines.telemetry.table import Commit, Replay

Bound = int | str | None
"""An offset, a time in ISO 8601, or None."""
FirstAfter = Callable[[datetime], int]
"""Finds the first offset of the stream at or after a time."""


class ReplayError(OsrdyneError):
    """The range of a replay is not valid."""


class ReplayConflictError(OsrdyneError):
    """The partition of the table holds something else."""


def plan_replay(
    last: Commit | None, begin: Bound, end: Bound, *, bounds: tuple[int, int], first_after: FirstAfter
) -> Replay:
    """The range of a replay. A repeated request gets the range of the first one, which the last commit repeats.

    Raises `ReplayError`, and `ReplayConflictError` if the partition was begun by something else.
    """
    if last is not None:
        if last.replay is None:
            raise ReplayConflictError(
                f"Partition {last.partition} of the table was begun by /ingest and has the offsets before {last.stop}; "
                "store a replay in a table of its own."
            )
        if (last.replay.begin, last.replay.end) != (begin, end):
            raise ReplayConflictError(
                f"Partition {last.partition} of the table holds the replay from {_shown(last.replay.begin)} to "
                f"{_shown(last.replay.end)}, not from {_shown(begin)} to {_shown(end)}; store this one in another "
                "table."
            )
        return last.replay
    try:
        times = {one: parse_time(one) for one in (begin, end) if isinstance(one, str)}
    except ValueError as error:
        raise ReplayError(str(error)) from None
    first, after = bounds
    start = first if begin is None else begin if isinstance(begin, int) else first_after(times[begin])
    stop = end if end is None or isinstance(end, int) else first_after(times[end])
    if start > after:
        raise ReplayError(f"The replay begins at offset {start}, and the stream ends at {after}.")
    if stop is not None and stop < start:
        raise ReplayError(f"The replay begins at offset {start}, after its end {stop}.")
    return Replay(begin, end, start, stop)


def _shown(bound: Bound) -> str:
    return "the end of the log" if bound is None else str(bound)
