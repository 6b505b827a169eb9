"""Writes the data files of one ingest, where Spark runs its tasks. They count only when a commit names them.

Source: docs/reference/telemetry/storage.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from osrdyne.protocol.event_mapping import EVENTS, EventMapping
from osrdyne_worker.pipelines.telemetry.events import Parsed, count_old, parse
from osrdyne_worker.pipelines.telemetry.live_files import DataFile
from osrdyne_worker.pipelines.telemetry.table import (
    INVALID_EVENTS,
    StorageError,
    data_file_name,
    fsync_directory,
    storage_error,
)

MAX_OPEN = 8
"""Hours whose files are open at the same time. Messages arrive in the order of time, so that more than 2 are rare."""
_ROW_GROUP = 200_000
_ROW_GROUP_BYTES = 64 * 1024 * 1024
_NO_TIME = "date=1970-01-01/hour=00"
"""Where invalid events are that have no time."""

RESULT = pa.schema([("result", pa.string())])


@dataclass(slots=True)
class _OpenFile:
    path: Path
    file: Any
    writer: Any
    waiting: list[pa.RecordBatch] = field(default_factory=list)
    waiting_rows: int = 0
    waiting_bytes: int = 0
    rows: int = 0


class DataFileWriter:
    """Writes rows of one partition to files by hour. Raises OSError; then call `abort`. `old`: events of `write` that
    were more than a year old when they arrived."""

    def __init__(self, directory: Path, *, partition: int, number: int, is_sorted: bool = False) -> None:
        self._directory = directory
        self._is_sorted = is_sorted
        self._partition, self._number = partition, number
        self._open: dict[str, _OpenFile] = {}  # the least recently used first
        self._written: list[Path] = []
        self._done: list[DataFile] = []
        self.old = 0

    def write(self, parsed: Parsed) -> None:
        self.old += count_old(parsed.events)
        self.append(parsed.events)
        self.append(parsed.invalid, invalid=True)

    def append(self, rows: pa.RecordBatch, *, invalid: bool = False) -> None:
        for directory, part in _by_hour(rows):
            self._append(f"{INVALID_EVENTS}/{directory}" if invalid else directory, part)

    def close(self) -> tuple[list[DataFile], list[DataFile]]:
        """Write everything to disk, with its directories; return the files of events, and of invalid events."""
        for name in list(self._open):
            self._finish(name)
        root = self._directory
        changed = {parent for path in self._written for parent in path.parents if parent.is_relative_to(root)}
        for one in sorted(changed):
            fsync_directory(one)
        invalid = [one for one in self._done if one.path.startswith(f"{INVALID_EVENTS}/")]
        return [one for one in self._done if one not in invalid], invalid

    def abort(self) -> None:
        """Remove what was written, as far as that is possible."""
        for one in self._open.values():
            with suppress(Exception):
                one.writer.close()
            with suppress(OSError):
                one.file.close()
        for path in self._written:
            with suppress(OSError):
                path.unlink()

    def _append(self, directory: str, rows: pa.RecordBatch) -> None:
        one = self._open.pop(directory, None) or self._create(directory, rows.schema)
        self._open[directory] = one
        one.waiting.append(rows)
        one.waiting_rows += len(rows)
        one.waiting_bytes += rows.nbytes
        if one.waiting_rows >= _ROW_GROUP or one.waiting_bytes >= _ROW_GROUP_BYTES:
            _write_group(one)
        if len(self._open) > MAX_OPEN:
            self._finish(next(iter(self._open)))

    def _create(self, name: str, schema: pa.Schema) -> _OpenFile:
        directory = self._directory / name
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / data_file_name(self._partition, self._number)
        self._written.append(path)
        file = path.open("xb")
        return _OpenFile(path, file, pq.ParquetWriter(file, schema, compression="zstd"))

    def _finish(self, name: str) -> None:
        one = self._open[name]
        _write_group(one)
        one.writer.close()
        one.file.flush()
        os.fsync(one.file.fileno())
        size = one.file.tell()
        one.file.close()
        del self._open[name]
        self._done.append(DataFile(one.path.relative_to(self._directory).as_posix(), one.rows, size, self._is_sorted))


def _write_group(one: _OpenFile) -> None:
    if one.waiting:
        one.writer.write_table(pa.Table.from_batches(one.waiting), row_group_size=one.waiting_rows)
        one.rows += one.waiting_rows
        one.waiting, one.waiting_rows, one.waiting_bytes = [], 0, 0


def _by_hour(rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Divide rows by the hour in which the ingress took them: the directory, and its rows."""
    if len(rows) == 0:
        return
    hours = pc.floor_temporal(rows.column("enqueued"), unit="hour")
    for hour in pc.unique(hours):
        when = hour.as_py()
        if when is None:
            yield _NO_TIME, rows.filter(pc.is_null(hours))
        else:
            yield f"date={when:%Y-%m-%d}/hour={when:%H}", rows.filter(pc.equal(hours, hour))


@dataclass(frozen=True)
class WriteRange:
    """The function of one Spark task: parses its messages, writes their rows, and returns the names of the files.
    `mapping`: how messages become events. `change` is applied to the rows before they are written."""

    directory: str
    partition: int
    number: int
    change: Callable[[Parsed], Parsed] | None = None
    mapping: EventMapping = EVENTS

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        writer = DataFileWriter(Path(self.directory), partition=self.partition, number=self.number)

        def write() -> None:
            for batch in batches:
                parsed = parse(batch, partition=self.partition, mapping=self.mapping)
                writer.write(parsed if self.change is None else self.change(parsed))

        yield write_files(writer, write)


def write_files(writer: DataFileWriter, write: Callable[[], None]) -> pa.RecordBatch:
    """Run `write` and close the writer; return the names of the files, or the error of the file system."""
    try:
        write()
        files, invalid = writer.close()
    except OSError as error:
        # As a result: an exception would reach the driver only as the text of a traceback.
        writer.abort()
        result: dict[str, Any] = {"errno": error.errno, "error": error.strerror or str(error)}
    except BaseException:
        writer.abort()
        raise
    else:
        result = {"files": [asdict(one) for one in files], "invalid_files": [asdict(one) for one in invalid]}
        result["old"] = writer.old
    return pa.RecordBatch.from_arrays([pa.array([json.dumps(result)])], schema=RESULT)


def collect(
    directory: Path, results: Iterable[dict[str, Any]]
) -> tuple[list[DataFile], list[DataFile], StorageError | None]:
    """The files of all tasks: of events, of invalid events; and an error, if a task had one."""
    files: list[DataFile] = []
    invalid: list[DataFile] = []
    failure = None
    for result in results:
        if "error" in result:
            failure = storage_error(directory, result["errno"], result["error"])
        else:
            files += [DataFile(**one) for one in result["files"]]
            invalid += [DataFile(**one) for one in result["invalid_files"]]
    return files, invalid, failure
