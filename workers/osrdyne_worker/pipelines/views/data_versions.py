"""The files below the tables of one key: their version, and whether a table is just being written.

Used by the SQL pipeline when it loads data, when a query fails, and for datasets with `watch: true`. Files that are not
local are listed only for these, through the JVM. Source: docs/reference/sql-pipeline/changing-data.md.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from osrdyne.logs import get_logger
from osrdyne_worker.pipelines.views.datasets import LIVE, ResolvedTable
from osrdyne_worker.pipelines.views.schemas import MAX_FILES, has_wildcards, local_path, walk_files
from osrdyne_worker.spark.files.file_listing import ListedFile, ListingError

log = get_logger(__name__)

ListRemote = Callable[[str], Iterable[ListedFile]]
"""Lists the files below a path that is not local; see `list_files`."""

SUCCESS = "_SUCCESS"
"""Written last by Spark and Hadoop."""
UNFINISHED = ("_temporary", ".spark-staging")
"""Directories in which Spark and Hadoop collect the files of a write until it ends."""
ABANDONED_AFTER = 3600.0
"""Seconds without a change after which such a directory counts as left by a failed write."""
SETTLED_AFTER = 60.0
"""Seconds without a change after which a directory that has lost its `_SUCCESS` or its files counts as complete."""
TRANSACTIONAL = frozenset({"delta", "iceberg", "table"}) | LIVE
"""Formats whose readers never see an unfinished write."""


@dataclass(frozen=True, slots=True)
class TableFiles:
    """The files of one table. `newest`: the latest change of a file or directory, in seconds since the epoch."""

    signature: str
    newest: float
    count: int
    has_success: bool
    unfinished: str | None = None
    """The name of a directory of a write that has not ended."""
    has_directories: bool = False


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files of all tables, by view; without tables whose files cannot be listed."""

    tables: dict[str, TableFiles]
    complete: bool
    """Whether the files of every table are known."""

    @property
    def signature(self) -> str | None:
        """Changes with every change of a file; None if not all files are known."""
        parts = [f"{view}\0{table.signature}" for view, table in sorted(self.tables.items())]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest() if self.complete else None

    @property
    def newest_ms(self) -> int | None:
        """The latest change in milliseconds since the epoch; None if not all files are known."""
        return int(max((one.newest for one in self.tables.values()), default=0.0) * 1000) if self.complete else None

    def being_written(self, former: DataFiles | None = None, *, now: float | None = None) -> str | None:
        """The view whose files are being written, and the sign of it; None if no view has one.

        `former`: the files of the data that is in use; `now`: seconds since the epoch.
        """
        moment = time.time() if now is None else now
        for view, table in self.tables.items():
            before = former.tables.get(view) if former is not None else None
            reason = _being_written(table, before, moment)
            if reason is not None:
                return f"The data of the view {view} is being written: {reason}."
        return None


def _being_written(table: TableFiles, before: TableFiles | None, now: float) -> str | None:
    if table.unfinished is not None:
        return f"its directory has {table.unfinished}, and no later {SUCCESS}"
    if before is None or now - table.newest > SETTLED_AFTER:
        return None
    if before.has_success and not table.has_success:
        return f"its directory had the file {SUCCESS}, and now has none"
    if before.count and not table.count:
        return "its directory had files, and is empty"
    return None


def data_files(tables: Iterable[ResolvedTable], list_remote: ListRemote | None = None) -> DataFiles:
    """List the files of the tables: up to `MAX_FILES` for each. Tables of telemetry are left out: queries see their
    commits without a reload. `list_remote`: for tables that are not local; without it, their files are unknown."""
    found: dict[str, TableFiles] = {}
    complete = True
    for table in (one for one in tables if one.spec.format not in LIVE):
        listed = None if table.spec.format == "table" else _files_of(table, list_remote)
        if listed is None:
            complete = False
        else:
            found[table.spec.view] = listed
    return DataFiles(found, complete)


def _files_of(table: ResolvedTable, list_remote: ListRemote | None) -> TableFiles | None:
    transactional = table.spec.format in TRANSACTIONAL
    local = local_path(table.path)
    if local is not None:
        return table_files(local, transactional=transactional)
    if list_remote is None or has_wildcards(table.path):
        return None
    try:
        return _summary(map(_remote_entry, list_remote(table.path)), transactional=transactional)
    except FileNotFoundError:
        return TableFiles(signature="missing", newest=0.0, count=0, has_success=False)
    except ListingError as error:
        log.warning("files of a view not listed", view=table.spec.view, reason=str(error))
        return None


def table_files(path: Path, *, transactional: bool = False, now: float | None = None) -> TableFiles | None:
    """The files below `path`, which may be missing; None for too many."""
    try:
        return _summary(_local_entries(path), transactional=transactional, now=now)
    except FileNotFoundError:
        return TableFiles(signature="missing", newest=_change_of(path.parent), count=0, has_success=False)
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file or directory. `parts`: of its path below the table; `mark`: changes with its content."""

    parts: tuple[str, ...]
    is_directory: bool
    changed: float
    mark: str


def _local_entries(path: Path) -> Iterator[_Entry]:
    for below, status in walk_files(path, directories=True):
        is_directory = below.is_dir()
        # The change time too: a file that is moved into the directory keeps its old modification time.
        changed = max(status.st_mtime, status.st_ctime)
        # The time of a directory is left out: it changes with every temporary file, and its entries are listed.
        size = "directory" if is_directory else f"{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}"
        yield _Entry(below.relative_to(path).parts, is_directory, changed, f"{size}\0{status.st_ino}")


def _remote_entry(file: ListedFile) -> _Entry:
    parts = tuple(file.path.split("/")) if file.path else ()
    mark = "directory" if file.is_directory else f"{file.size}\0{file.modified}\0{file.identity}"
    return _Entry(parts, file.is_directory, file.modified, mark)


def _summary(entries: Iterable[_Entry], *, transactional: bool, now: float | None = None) -> TableFiles | None:
    """The files of a table; None for too many."""
    moment = time.time() if now is None else now
    marks: list[str] = []
    newest, count, has_directories = 0.0, 0, False
    success: float | None = None
    unfinished: dict[str, float] = {}
    for number, entry in enumerate(entries):
        if number >= 2 * MAX_FILES:
            return None
        marker = next((part for part in entry.parts if part.startswith(UNFINISHED)), None)
        if marker is not None:
            # Not part of the data: a running write changes it with every file.
            unfinished[marker] = max(entry.changed, unfinished.get(marker, 0.0))
            continue
        newest = max(newest, entry.changed)
        if entry.parts == (SUCCESS,):
            success = entry.changed
        has_directories = has_directories or (entry.is_directory and bool(entry.parts))
        count += not entry.is_directory and entry.parts[-1:] != (SUCCESS,)
        marks.append(f"{'/'.join(entry.parts)}\0{entry.mark}\n")
    live = [name for name, changed in unfinished.items() if moment - changed < ABANDONED_AFTER]
    pending = [name for name in live if success is None or unfinished[name] >= success]
    return TableFiles(
        # Sorted: file systems may list in any order.
        signature=hashlib.sha256("".join(sorted(marks)).encode("utf-8", "surrogatepass")).hexdigest(),
        newest=newest,
        count=count,
        has_success=success is not None,
        unfinished=None if transactional or not pending else sorted(pending)[0],
        has_directories=has_directories,
    )


def _change_of(path: Path) -> float:
    try:
        status = path.stat()
    except OSError:
        return 0.0
    return max(status.st_mtime, status.st_ctime)
