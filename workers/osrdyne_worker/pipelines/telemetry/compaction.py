"""Compaction: merges the files of closed hours into files that are sorted by key, series and time. No Spark session.

One commit replaces the files of several hours, so a reader has the rows of before or those of after, which are the
same. An ingest compacts within the time of its request, in several commits. A crash around each one:

1. The commit of the ingest. Crash before: nothing is stored or merged. After: its events are stored, no hour is merged.
2. A commit of a few hours. Crash before: the files of these hours count, and the new ones are removed as uncommitted.
   After: the new ones count. The hours that are left are merged later, by whichever worker.

Source: docs/reference/telemetry/compaction.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from osrdyne_worker.pipelines.telemetry.data_files import DataFileWriter, collect, write_files
from osrdyne_worker.pipelines.telemetry.events import EVENTS, INVALID
from osrdyne_worker.pipelines.telemetry.live_files import DataFile, LiveFiles
from osrdyne_worker.pipelines.telemetry.table import Commit, Table, TableDamagedError, hour_of

SORTED_BY = ("key", "series", "ts", "offset", "index")
INVALID_SORTED_BY = ("key", "offset", "index")


@dataclass(frozen=True, slots=True)
class Compaction:
    """Files to merge, for the commit after `after`. `hours`: their number; `remaining`: hours that are left."""

    after: int
    files: tuple[DataFile, ...]
    invalid_files: tuple[DataFile, ...]
    hours: int
    remaining: int

    @property
    def number(self) -> int:
        return self.after + 1


def plan_compaction(live: LiveFiles, *, max_hours: int) -> Compaction:
    """The oldest closed hours of a partition that have a file which is not sorted.

    An hour is closed if the partition has a later one: messages of the log are almost in the order of their time. Rows
    that come late are merged by a later compaction.
    """
    all_files = (*live.files.values(), *live.invalid_files.values())
    hours = {one.path: hour_of(one.path) for one in all_files}
    newest = max(hours.values(), default=None)
    to_merge = sorted({hours[one.path] for one in all_files if not one.sorted and hours[one.path] != newest})
    chosen = set(to_merge[:max_hours])
    files, invalid = (
        tuple(one for one in several.values() if hours[one.path] in chosen)
        for several in (live.files, live.invalid_files)
    )
    return Compaction(live.number, files, invalid, len(chosen), len(to_merge) - len(chosen))


def compact_within(budget: float, merge: Callable[[int], int], *, max_hours: int, time: Callable[[], float]) -> int:
    """Merge hours as long as the next ones are likely to end within a number of seconds; return how many are left.

    `merge`: merges up to a number of hours in one commit, and returns how many are left. The first one shows how long
    an hour takes; `max_hours`: at most so many in each later commit.
    """
    began, hours, slowest = time(), 1, 0.0
    while True:
        started = time()
        remaining = merge(hours)
        slowest = max(slowest, (time() - started) / hours)
        left = budget - (time() - began)
        hours = max_hours if slowest == 0 else int(min(max_hours, left / slowest))
        if not remaining or left <= 0 or hours < 1:
            return remaining


@dataclass(frozen=True)
class WriteSorted:
    """The function of one Spark task: writes sorted rows, hour by hour, and returns the names of the files."""

    directory: str
    partition: int
    number: int
    invalid: bool

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = INVALID if self.invalid else EVENTS
        writer = DataFileWriter(Path(self.directory), partition=self.partition, number=self.number, is_sorted=True)

        def write() -> None:
            for batch in batches:
                # Spark's types have other details: the time zone of its session, names in maps.
                for rows in pa.Table.from_batches([batch]).cast(schema).to_batches():
                    writer.append(rows, invalid=self.invalid)

        yield write_files(writer, write)


def commit_compaction(table: Table, plan: Compaction, results: Iterable[str], *, partition: int) -> Commit:
    """Replace the merged files by those that the tasks have written.

    Raises `StorageError`, `CommitConflictError`, and `TableDamagedError` if rows are missing; nothing is changed then.
    """
    files, invalid, failure = collect(table.directory, map(json.loads, results))
    commit = Commit(partition, plan.number, 0, 0, files, invalid)
    if failure is not None:
        table.discard(commit)
        raise failure
    for kind, before, after in (("rows", plan.files, files), ("invalid rows", plan.invalid_files, invalid)):
        read, written = sum(one.rows for one in before), sum(one.rows for one in after)
        if read != written:
            table.discard(commit)
            raise TableDamagedError(
                f"The commits of partition {partition} of {table.directory} name {read} {kind} in files to merge, but "
                f"these files have {written}; restore them from a backup. Nothing was changed."
            )
    removed = [one.path for one in (*plan.files, *plan.invalid_files)]
    return table.replace_files(partition, removed, after=plan.after, files=files, invalid_files=invalid)
