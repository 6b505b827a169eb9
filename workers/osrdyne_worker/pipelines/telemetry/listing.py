"""The committed files of a table, for queries: listed again only if a commit has come.

Used by the SQL pipeline, whose workers may have many keys over one table. Commits are numbered without gaps, so two
checks of file names in each partition show whether there is a new one. No Spark.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from osrdyne_worker.pipelines.telemetry.events import EVENTS
from osrdyne_worker.pipelines.telemetry.live_files import DataFile
from osrdyne_worker.pipelines.telemetry.table import COMMITS, Table, TableDamagedError, storage_errors

_TYPES = {
    "string": "string",
    "timestamp[us, tz=UTC]": "timestamp",
    "double": "double",
    "int32": "int",
    "int64": "bigint",
    "map<string, string>": "map<string, string>",
}
EVENT_COLUMNS = ", ".join(f"`{one.name}` {_TYPES[str(one.type)]}" for one in EVENTS)
"""The columns of a table as DDL."""
_PATH = re.compile(r"date=([0-9]{4}-[0-9]{2}-[0-9]{2})/hour=([0-9]{2})/([0-9a-f-]+\.parquet)")


@dataclass(frozen=True, eq=False)
class Listing:
    """The committed files of a table at one moment: date, hour, name and size of each."""

    files: tuple[tuple[str, str, str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class _Head:
    """The newest commit of a partition; the inode and the time of its file."""

    number: int
    identity: tuple[int, int] | None


class CommittedFiles:
    """The files of one table. Thread-safe. Methods block, and raise `StorageError` and `TableDamagedError`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._table = Table(directory)
        self._heads: dict[int, _Head] = {}
        self._listing = Listing()

    def current(self) -> Listing:
        """The files of all commits that were made before this call; the same object if nothing has changed."""
        with self._lock, storage_errors(self._directory):
            partitions = self._table.partitions()
            if sorted(self._heads) != partitions or any(self._has_changed(one) for one in partitions):
                self._list(partitions)
            return self._listing

    def _has_changed(self, partition: int) -> bool:
        return self._has_next(partition) or self._was_replaced(partition)

    def _has_next(self, partition: int) -> bool:
        return self._path(partition, self._heads[partition].number + 1).exists()

    def _was_replaced(self, partition: int) -> bool:
        """Whether the newest known commit is gone or another one: the table was restored from a backup."""
        head = self._heads[partition]
        return self._identity(partition, head.number) != head.identity

    def _list(self, partitions: list[int]) -> None:
        if any(self._was_replaced(one) for one in self._heads):
            self._table = Table(self._directory)  # a new one: the former one remembers the replaced commits
        # A commit that comes while this lists the others is found by the next call.
        heads, files = {}, []
        for partition in partitions:
            live = self._table.live(partition)
            heads[partition] = _Head(live.number, self._identity(partition, live.number))
            files += [_listed(self._directory, file) for file in live.files.values()]
        self._listing, self._heads = Listing(tuple(files)), heads

    def _identity(self, partition: int, number: int) -> tuple[int, int] | None:
        """Inode and time of a commit: a table that was restored from a backup has other ones. None before the first."""
        try:
            status = self._path(partition, number).stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _path(self, partition: int, number: int) -> Path:
        return self._directory / COMMITS / str(partition) / f"{number:020d}.json"


def _listed(directory: Path, file: DataFile) -> tuple[str, str, str, int]:
    found = _PATH.fullmatch(file.path)
    if found is None:
        raise TableDamagedError(
            f"A commit of {directory} names {file.path!r}, which is not a data file; restore the table from a backup."
        )
    return found[1], found[2], found[3], file.bytes


@lru_cache(maxsize=256)
def committed_files(directory: Path) -> CommittedFiles:
    """The files of the table in a directory. All keys of this process share them."""
    return CommittedFiles(directory)
