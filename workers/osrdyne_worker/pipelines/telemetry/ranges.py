"""Decides which offsets an ingest stores next, and commits what Spark's tasks have written. No Spark.

Source: docs/reference/telemetry/ingest.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath

from osrdyne.errors import StreamDataLostError
from osrdyne_worker.pipelines.telemetry.data_files import collect
from osrdyne_worker.pipelines.telemetry.table import (
    Commit,
    Replay,
    StorageError,
    Table,
    TableDamagedError,
)


@dataclass(frozen=True, slots=True)
class Range:
    """The offsets from `start` to before `stop`, to be stored by the commit `number`. Nothing to store if both are the
    same. `end`: where the stream ended, or the end of the replay. `replay`: what the commit repeats."""

    number: int
    start: int
    stop: int
    end: int
    replay: Replay | None = None

    @property
    def is_commit(self) -> bool:
        """Whether there is something to commit. The first commit of a replay records it, also without an offset."""
        return self.stop > self.start or (self.number == 1 and self.replay is not None)


def next_range(
    last: Commit | None,
    bounds: tuple[int, int] | None,
    *,
    stream: str,
    max_offsets: int,
    fail_on_data_loss: bool,
    replay: Replay | None = None,
) -> Range:
    """The range after the last commit. `bounds`: the first offset of the stream and the one after its last; None if it
    has no messages. `replay`: where a partition without a commit begins and ends; a later range ends where the last
    commit names. Raises `StreamDataLostError` if the stream no longer has the next offset."""
    number, position = (1, None if replay is None else replay.start) if last is None else (last.number + 1, last.stop)
    replay = replay if last is None else last.replay
    if bounds is None:
        return Range(number, position or 0, position or 0, position or 0, replay)
    first, end = bounds
    start = first if position is None else position
    if start > end:
        raise StreamDataLostError(
            f"The stream {stream} ends at offset {end}, before the position {start} of the table: it was deleted and "
            "declared again, and its offsets no longer identify events. Move the table to another directory; the next "
            "ingest begins a new one.",
            stream=stream,
            start=start,
            stop=end,
        )
    if replay is not None and replay.stop is not None:
        end = max(start, min(end, replay.stop))
    if start < first and start < end:
        if fail_on_data_loss:
            raise data_lost(stream, start, min(first, end))
        start = min(first, end)
    return Range(number, start, min(end, start + max_offsets), end, replay)


def data_lost(stream: str, start: int, stop: int) -> StreamDataLostError:
    """The retention of the log has removed the offsets from `start` to before `stop`."""
    return StreamDataLostError(
        f"The offsets {start} to {stop - 1} of the stream {stream} are no longer in it: its retention removed them "
        "before they were stored. Set fail_on_data_loss to false to go on with the first message that the stream has.",
        stream=stream,
        start=start,
        stop=stop,
    )


def store(table: Table, wanted: Range, results: Iterable[str], *, partition: int, copies: int = 0) -> Commit:
    """Commit the files of all tasks; `results`: what `WriteRange` returned.

    If a task has failed (`StorageError`) or the offsets were committed meanwhile (`CommitConflictError`), the files are
    removed. If the commit itself fails (`StorageError`), the next ingest finds out whether it was made.
    """
    files, invalid, failure = collect(table.directory, map(json.loads, results))
    commit = Commit(
        partition, wanted.number, wanted.start, wanted.stop, files, invalid, replay=wanted.replay, copies=copies
    )
    if failure is not None:
        table.discard(commit)
        raise failure
    table.commit(commit)
    # A killed ingest of the same range has left files in the same directories. An error here does not matter: no commit
    # names them.
    with suppress(StorageError, TableDamagedError):
        table.remove_uncommitted(partition, {str(PurePosixPath(one.path).parent) for one in (*files, *invalid)})
    return commit
