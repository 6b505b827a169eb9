"""A table of telemetry: Parquet files, and a commit log for each partition of the log of telemetry.

A commit is a file that names data files and the range of offsets that they hold. It appears in one step, after its data
files are on disk, and two writers never get the same number. So each range is stored once, also if an ingest is killed:

- before the commit, its data files are uncommitted: readers do not see them, and a later ingest removes them;
- after the commit, the next ingest begins where it ends.

The directory is on one file system with hard links. No Spark. Source: docs/reference/telemetry/storage.md.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from osrdyne.errors import OsrdyneError
from osrdyne_worker.pipelines.telemetry.live_files import (
    DataFile,
    LiveFiles,
    decode_checkpoint,
    encode_checkpoint,
)

COMMITS = "_commits"
INVALID_EVENTS = "_invalid"
_FORMAT = 1
CHECKPOINT_INTERVAL = 100
"""Commits from one checkpoint to the next. Two checkpoints are kept."""
KEEP_REMOVED = 3600.0
"""Seconds for which removed files stay on disk, for programs that have listed them."""
_CHECKPOINT = re.compile(r"([0-9]{20})\.checkpoint")
_COMMIT = re.compile(r"([0-9]{20})\.json")
_UNFINISHED = re.compile(r"\.([0-9]{20})-[0-9a-f]{32}\.tmp")
_HOUR = re.compile(r"(?:^|/)date=([0-9]{4}-[0-9]{2}-[0-9]{2})/hour=([0-9]{2})/")
_DATA = re.compile(r"([0-9]{1,10})-([0-9]{20})-[0-9a-f]{32}\.parquet")


class CommitConflictError(OsrdyneError):
    """Another ingest has committed the same offsets first."""

    retryable = True


class StorageError(OsrdyneError):
    """The directory of a table refuses an operation, or is full."""

    retryable = True


class TableDamagedError(OsrdyneError):
    """A file of a table is missing or damaged."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The part of the log that a partition of a table is limited to, from `start` to before `stop`; `stop` is None if
    it has no end. `begin` and `end`: how the request named it."""

    begin: int | str | None
    end: int | str | None
    start: int
    stop: int | None


@dataclass(frozen=True, slots=True)
class Commit:
    """What one ingest stored: the offsets from `start` to before `stop` of a partition. `number` counts from 1.

    `removed`: paths of data files of earlier commits that no longer belong to the table. `replay`: as in the first
    commit; each one repeats it. `at`: when it was made, seconds since the epoch. `deleted_before`: files that earlier
    commits removed before this time are no longer on disk; 0 if this commit deleted none.
    `copies`: messages that were dropped or marked. `purged`: rows in the removed files, if the table was too large.
    """

    partition: int
    number: int
    start: int
    stop: int
    files: Sequence[DataFile] = ()
    invalid_files: Sequence[DataFile] = ()
    removed: Sequence[str] = ()
    replay: Replay | None = None
    at: float = field(default_factory=time.time)
    deleted_before: float = 0.0
    copies: int = 0
    purged: int = 0

    @property
    def rows(self) -> int:
        return sum(one.rows for one in self.files)

    @property
    def invalid(self) -> int:
        return sum(one.rows for one in self.invalid_files)


class Table:
    """One table in a directory. Methods block, and raise `StorageError` and `TableDamagedError`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._live: dict[int, LiveFiles] = {}

    def last_commit(self, partition: int) -> Commit | None:
        """The newest commit of a partition; None before the first."""
        numbers = self._numbers(partition)
        return self.read(partition, numbers[-1]) if numbers else None

    def commits(self, partition: int) -> Iterator[Commit]:
        """All commits of a partition, the oldest first."""
        for number in self._numbers(partition):
            yield self.read(partition, number)

    def partitions(self) -> list[int]:
        """The partitions that have commits."""
        with storage_errors(self.directory):
            names = _names(self.directory / COMMITS)
        return sorted(int(name) for name in names if name.isdecimal())

    def positions(self) -> dict[int, int]:
        """The next offset of each partition that has commits."""
        last = {one: self.last_commit(one) for one in self.partitions()}
        return {one: commit.stop for one, commit in last.items() if commit is not None}

    def files(self, *, invalid: bool = False) -> list[str]:
        """The paths of all committed data files: of events, or of invalid events. Other files are not part of it."""
        several = [self.live(partition) for partition in self.partitions()]
        return [
            str(self.directory / path) for live in several for path in (live.invalid_files if invalid else live.files)
        ]

    def live(self, partition: int) -> LiveFiles:
        """The data files of a partition after its newest commit; do not change it."""
        live, last = self._live.get(partition), 0
        with storage_errors(self.directory):
            # Numbers have no gaps, so what is new is found without a list of all commits.
            if live is None or not (live.number and self._path(partition, live.number).exists()):
                commits, checkpoints = self._listed(partition)
                last = commits[-1] if commits else 0
                live = self._newest_checkpoint(partition, [one for one in checkpoints if one <= last])
                live = live or LiveFiles()
            while live.number < last or self._path(partition, live.number + 1).exists():
                number = live.number + 1
                if not (path := self._path(partition, number)).exists():
                    raise TableDamagedError(f"{path} is missing; restore it from a backup.")
                commit = self.read(partition, number)
                live.apply(
                    number,
                    files=commit.files,
                    invalid_files=commit.invalid_files,
                    removed=commit.removed,
                    at=commit.at,
                    deleted_before=commit.deleted_before,
                    copies=commit.copies,
                    purged=commit.purged,
                )
        self._live[partition] = live
        return live

    def _newest_checkpoint(self, partition: int, numbers: Sequence[int]) -> LiveFiles | None:
        """The files of the newest checkpoint that is complete and fits its commit; None without one."""
        for number in reversed(numbers):
            with suppress(OSError):
                content = (self._log(partition) / f"{number:020d}.checkpoint").read_bytes()
                commit = self._path(partition, number).read_bytes()
                if (live := decode_checkpoint(content, number=number, commit=commit)) is not None:
                    return live
        return None

    def commit(self, commit: Commit) -> None:
        """Commit data files that are on disk. Raises `CommitConflictError` if the number is taken; then nothing of this
        commit is stored."""
        directory = self._log(commit.partition)
        document = {"format": _FORMAT, **asdict(commit), "rows": commit.rows, "invalid": commit.invalid}
        unfinished = directory / f".{commit.number:020d}-{uuid.uuid4().hex}.tmp"
        with storage_errors(self.directory):
            self._make_directory(directory, is_first=commit.number == 1)
            try:
                content = json.dumps(document).encode()
                with unfinished.open("xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                name = self._path(commit.partition, commit.number)
                try:
                    # A rename would replace the commit of another ingest.
                    os.link(unfinished, name)
                except (FileExistsError, FileNotFoundError):
                    if not name.exists():
                        raise
                    # The other ingest may also have removed our unfinished commit. Over NFS, the commit may be ours:
                    # the kernel repeats a call whose answer was lost, and finds the name that it has created.
                    if name.read_bytes() != content:
                        self.discard(commit)
                        raise CommitConflictError(
                            f"Another ingest has committed the offsets from {commit.start} of partition "
                            f"{commit.partition} to {self.directory} (commit {commit.number}). Nothing of this one was "
                            "stored; request the next ingest.",
                            partition=commit.partition,
                            number=commit.number,
                        ) from None
            finally:
                with suppress(OSError):
                    unfinished.unlink()
            fsync_directory(directory)
        # Without a checkpoint, readers read more commits; the next commit tries again.
        with suppress(StorageError, TableDamagedError):
            self._write_checkpoint(commit.partition)

    def _write_checkpoint(self, partition: int) -> None:
        """Write a checkpoint if one is due, and remove all but the last two."""
        commits, checkpoints = self._listed(partition)
        if commits[-1] - (checkpoints[-1] if checkpoints else 0) < CHECKPOINT_INTERVAL:
            return
        live = self.live(partition)
        directory = self._log(partition)
        unfinished = directory / f".{live.number:020d}-{uuid.uuid4().hex}.tmp"
        with storage_errors(self.directory):
            content = encode_checkpoint(live, commit=self._path(partition, live.number).read_bytes())
            try:
                with unfinished.open("xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                # Two that are made of the same commits are the same.
                unfinished.replace(directory / f"{live.number:020d}.checkpoint")
            finally:
                with suppress(OSError):
                    unfinished.unlink()
            for number in checkpoints[:-1]:
                (directory / f"{number:020d}.checkpoint").unlink(missing_ok=True)

    def expire(self, partition: int, before: datetime) -> Commit | None:
        """Remove the hours of a partition that ended before a time; return the commit, None if there are none.

        Raises `CommitConflictError` if an ingest committed meanwhile; the next call tries again.
        """
        live = self.live(partition)
        limit = before.astimezone(UTC) - timedelta(hours=1)
        expired = sorted(path for path in (*live.files, *live.invalid_files) if hour_of(path) <= limit)
        return self.replace_files(partition, expired, after=live.number) if expired else None

    def replace_files(
        self,
        partition: int,
        removed: Sequence[str],
        *,
        after: int,
        files: Sequence[DataFile] = (),
        invalid_files: Sequence[DataFile] = (),
        purged: int = 0,
    ) -> Commit:
        """Remove data files from a partition, and add others in their place, in one commit without offsets.

        `after`: the commit with whose files this was planned. Raises `CommitConflictError` if there is a later one.
        """
        deleted_before = self.delete_removed(partition)
        last = self.read(partition, after)
        commit = replace(
            last,
            number=last.number + 1,
            start=last.stop,
            files=tuple(files),
            invalid_files=tuple(invalid_files),
            removed=tuple(removed),
            at=time.time(),
            deleted_before=deleted_before,
            copies=0,
            purged=purged,
        )
        self.commit(commit)
        return commit

    def delete_removed(self, partition: int) -> float:
        """Delete files from disk that were removed from the table `KEEP_REMOVED` ago; return that time."""
        limit = time.time() - KEEP_REMOVED
        with storage_errors(self.directory):
            for path, when in self.live(partition).removed.items():
                if when < limit:
                    (self.directory / path).unlink(missing_ok=True)
        return limit

    def discard(self, commit: Commit) -> None:
        """Remove the data files of a commit that was not made, as far as that is possible."""
        for file in (*commit.files, *commit.invalid_files):
            with suppress(OSError):
                (self.directory / file.path).unlink()

    def _make_directory(self, directory: Path, *, is_first: bool) -> None:
        """Make a directory of commits, which must not disappear in a power failure. An ingest that was killed may have
        made it for the first commit, and not have written its name to disk."""
        if is_first or not directory.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            for parent in (directory.parent, self.directory, self.directory.parent):
                fsync_directory(parent)

    def remove_uncommitted(self, partition: int, directories: Iterable[str] | None = None) -> list[str]:
        """Remove data files that were written for a commit whose number another ingest has taken; return their paths.

        `directories`: those to search, relative to the table; None: all. Files of an ingest that is running have a
        number that is not taken, and stay.
        """
        live = self.live(partition)
        removed = []
        with storage_errors(self.directory):
            for path in self._data_files(directories):
                found = _DATA.fullmatch(path.name)
                if found is None or int(found[1]) != partition or int(found[2]) > live.number:
                    continue
                relative = path.relative_to(self.directory).as_posix()
                if not any(relative in several for several in (live.files, live.invalid_files, live.removed)):
                    path.unlink(missing_ok=True)
                    removed.append(relative)
            for name in _names(self._log(partition)):
                if (unfinished := _UNFINISHED.fullmatch(name)) is not None and int(unfinished[1]) <= live.number:
                    (self._log(partition) / name).unlink(missing_ok=True)
        return sorted(removed)

    def _data_files(self, directories: Iterable[str] | None) -> Iterator[Path]:
        if directories is None:
            for pattern in ("date=*/hour=*/*.parquet", f"{INVALID_EVENTS}/date=*/hour=*/*.parquet"):
                yield from self.directory.glob(pattern)
        else:
            for one in sorted(set(directories)):
                yield from (self.directory / one).glob("*.parquet")

    def _path(self, partition: int, number: int) -> Path:
        return self._log(partition) / f"{number:020d}.json"

    def _log(self, partition: int) -> Path:
        return self.directory / COMMITS / str(partition)

    def _numbers(self, partition: int) -> list[int]:
        return self._listed(partition)[0]

    def _listed(self, partition: int) -> tuple[list[int], list[int]]:
        """The numbers of commits, and of checkpoints."""
        with storage_errors(self.directory):
            names = _names(self._log(partition))
        commits, checkpoints = (
            sorted(int(found[1]) for name in names if (found := pattern.fullmatch(name)) is not None)
            for pattern in (_COMMIT, _CHECKPOINT)
        )
        return commits, checkpoints

    def read(self, partition: int, number: int) -> Commit:
        """One commit, which must exist."""
        path = self._path(partition, number)
        try:
            document = json.loads(path.read_bytes())
            if document["format"] != _FORMAT:
                raise TableDamagedError(f"{path} has the format {document['format']}; this version reads {_FORMAT}.")
            replay = document.get("replay")
            return Commit(
                partition,
                number,
                start=int(document["start"]),
                stop=int(document["stop"]),
                files=[DataFile(**one) for one in document["files"]],
                invalid_files=[DataFile(**one) for one in document["invalid_files"]],
                removed=tuple(document.get("removed", ())),
                replay=None if replay is None else Replay(**replay),
                at=float(document.get("at", 0)),
                deleted_before=float(document.get("deleted_before", 0)),
                copies=int(document.get("copies", 0)),
                purged=int(document.get("purged", 0)),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise TableDamagedError(f"{path} is not a commit ({error!r}); restore it from a backup.") from None
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}.") from None


def hour_of(path: str) -> datetime:
    """When the hour of a data file began."""
    found = _HOUR.search(path)
    if found is None:
        raise TableDamagedError(f"A commit names {path}, which is not in a directory of an hour.")
    return datetime.strptime(f"{found[1]}T{found[2]}+0000", "%Y-%m-%dT%H%z")


def data_file_name(partition: int, number: int) -> str:
    """The name of a new data file for a commit."""
    return f"{partition}-{number:020d}-{uuid.uuid4().hex}.parquet"


def fsync_directory(directory: Path) -> None:
    """Write the names in a directory to disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def storage_errors(directory: Path) -> Iterator[None]:
    """Translate errors of the file system."""
    try:
        yield
    except OSError as error:
        raise storage_error(directory, error.errno, error.strerror) from None


def storage_error(directory: Path | str, number: int | None, reason: str | None) -> StorageError:
    if number in (errno.ENOSPC, errno.EDQUOT):
        remedy = "Free space, or remove old data; the log keeps the events meanwhile."
    else:
        remedy = "The worker needs to read and write there."
    return StorageError(f"The table {directory} cannot be used: {reason or 'unknown error'}. {remedy}", errno=number)


def _names(directory: Path) -> list[str]:
    try:
        return [one.name for one in directory.iterdir()]
    except FileNotFoundError:
        return []
