"""Keeps a table below its number of rows and its size: removes its oldest hours, or refuses to store more. No Spark.

The limit is of the whole table, so the worker of one partition counts all of them.
Source: docs/reference/telemetry/storage-limits.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from osrdyne.errors import OsrdyneError
from osrdyne.logs import get_logger
from osrdyne_worker.pipelines.telemetry.live_files import DataFile, LiveFiles
from osrdyne_worker.pipelines.telemetry.table import CommitConflictError, Table, hour_of

log = get_logger(__name__)


class StorageLimitError(OsrdyneError):
    """The table has reached its limit of rows or bytes, and stores nothing more."""

    retryable = True


@dataclass(frozen=True, slots=True)
class StorageLimit:
    """`action`: what happens at the limit. None: without a limit."""

    max_rows: int | None
    max_bytes: int | None
    action: Literal["purge", "pause"]

    @property
    def is_set(self) -> bool:
        return self.max_rows is not None or self.max_bytes is not None


@dataclass(frozen=True, slots=True)
class Usage:
    """Rows of events and of invalid events, and the size of their files."""

    rows: int
    bytes: int

    def reaches(self, limit: StorageLimit) -> bool:
        return (limit.max_rows is not None and self.rows >= limit.max_rows) or (
            limit.max_bytes is not None and self.bytes >= limit.max_bytes
        )


def usage_of(table: Table) -> Usage:
    """What all partitions have together."""
    files = [one for partition in table.partitions() for one in _files(table.live(partition))]
    return _sum(files)


def check_limit(table: Table, limit: StorageLimit) -> None:
    """Raise `StorageLimitError` if the table has reached its limit and may not remove its oldest hours."""
    if limit.is_set and limit.action == "pause" and (usage := usage_of(table)).reaches(limit):
        raise StorageLimitError(
            f"The table {table.directory} has {usage.rows} rows and {usage.bytes} bytes; the limit is "
            f"{_shown(limit)}. Nothing more is stored: raise the limit, or remove older events with retention_days or "
            "with on_storage_limit: purge. The log keeps the events meanwhile."
        )


def purge(table: Table, limit: StorageLimit, *, partition: int) -> int:
    """Remove the oldest hours of the table until it is below its limit; return how many rows they had.

    The newest hour stays. `partition`: that of this worker. If an ingest of another partition commits meanwhile, a
    later call removes the hours of that partition.
    """
    if not limit.is_set or limit.action != "purge":
        return 0
    lives = {one: table.live(one) for one in table.partitions()}
    last = last_hour_to_purge(lives, limit)
    if last is None:
        return 0
    purged = 0
    for one in sorted(lives, key=lambda one: (one != partition, one)):
        old = [file for file in _files(lives[one]) if hour_of(file.path) <= last]
        if old:
            rows = _sum(old).rows
            try:
                table.replace_files(one, [file.path for file in old], after=lives[one].number, purged=rows)
            except CommitConflictError:
                log.info("hours not purged during an ingest", table=str(table.directory), partition=one)
            else:
                purged += rows
    if purged:
        log.info("oldest hours purged", table=str(table.directory), rows=purged, last=last.isoformat())
    return purged


def last_hour_to_purge(lives: Mapping[int, LiveFiles], limit: StorageLimit) -> datetime | None:
    """The last of the oldest hours that must be removed; None if the table is below its limit."""
    by_hour: dict[datetime, list[DataFile]] = {}
    for live in lives.values():
        for file in _files(live):
            by_hour.setdefault(hour_of(file.path), []).append(file)
    usage = _sum([file for files in by_hour.values() for file in files])
    last = None
    for hour in sorted(by_hour)[:-1]:
        if not usage.reaches(limit):
            break
        old = _sum(by_hour[hour])
        usage, last = Usage(usage.rows - old.rows, usage.bytes - old.bytes), hour
    return last


def _files(live: LiveFiles) -> tuple[DataFile, ...]:
    return (*live.files.values(), *live.invalid_files.values())


def _sum(files: list[DataFile] | tuple[DataFile, ...]) -> Usage:
    return Usage(sum(one.rows for one in files), sum(one.bytes for one in files))


def _shown(limit: StorageLimit) -> str:
    limits = ((limit.max_rows, "rows"), (limit.max_bytes, "bytes"))
    return " and ".join(f"{most} {unit}" for most, unit in limits if most is not None)
