"""Publishes the commits of a table as a Delta table: the same Parquet files, named by a log of Delta Lake beside ours.

The commits of the table decide; the Delta log repeats them. Each Delta commit has an action `txn` for each partition,
with the number of the last commit that it repeats. It appears in one step, and no version is written twice. So each
commit is published once, by whichever worker, also if one is killed: the next request publishes what is missing.

Only events, not invalid ones. No Spark, no jar: protocol versions 1 and 2, which every reader of Delta Lake supports.
Source: docs/how-to/publish-delta-tables.md; the protocol: https://github.com/delta-io/delta/blob/master/PROTOCOL.md
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pyarrow as pa

from osrdyne_worker.pipelines.telemetry.events import EVENTS
from osrdyne_worker.pipelines.telemetry.live_files import DataFile
from osrdyne_worker.pipelines.telemetry.table import (
    INVALID_EVENTS,
    Table,
    TableDamagedError,
    fsync_directory,
    hour_of,
    storage_errors,
)

DIRECTORY = "_delta_log"
_VERSION = re.compile(r"([0-9]{20})\.json")
_APP = re.compile(r"osrdyne-([0-9]{1,10})")
_TYPES = {
    pa.string(): "string",
    pa.float64(): "double",
    pa.int32(): "integer",
    pa.int64(): "long",
    pa.timestamp("us", tz="UTC"): "timestamp",
    pa.map_(pa.string(), pa.string()): {
        "type": "map",
        "keyType": "string",
        "valueType": "string",
        "valueContainsNull": True,
    },
}
_PARTITION_COLUMNS = {"date": "date", "hour": "integer"}
SCHEMA = {
    "type": "struct",
    "fields": [
        {"name": name, "type": kind, "nullable": True, "metadata": {}}
        for name, kind in [*((field.name, _TYPES[field.type]) for field in EVENTS), *_PARTITION_COLUMNS.items()]
    ],
}

Action = dict[str, Any]


class DeltaLog:
    """The Delta log of one table. Methods block, and raise `StorageError` and `TableDamagedError`."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._directory = table.directory / DIRECTORY
        self._version = -1
        self._published: dict[int, int] = {}

    def publish(self) -> int:
        """Publish the commits of all partitions that are not published yet; return the version of the Delta table."""
        while True:
            self._refresh()
            actions = [action for partition in self._table.partitions() for action in self._actions(partition)]
            if not actions:
                return self._version
            self._write(self._version + 1, actions)

    def _refresh(self) -> None:
        """Read which commits are published: versions that are new, the last one first."""
        with storage_errors(self._table.directory):
            names = [one.name for one in self._directory.iterdir()] if self._directory.is_dir() else []
        versions = sorted(int(match[1]) for name in names if (match := _VERSION.fullmatch(name)) is not None)
        if not versions or versions[-1] < self._version:
            self._version, self._published = -1, {}
        wanted = set(self._table.partitions())
        found: dict[int, int] = {}
        for version in reversed(versions):
            if version <= self._version or wanted <= found.keys():
                break
            for partition, number in self._transactions(version).items():
                found.setdefault(partition, number)
        self._published |= found
        self._version = versions[-1] if versions else -1

    def _transactions(self, version: int) -> dict[int, int]:
        path = self._directory / f"{version:020d}.json"
        try:
            with storage_errors(self._table.directory):
                lines = path.read_text(encoding="utf-8").splitlines()
            several = [json.loads(line)["txn"] for line in lines if line.startswith('{"txn"')]
            apps = [(_APP.fullmatch(one["appId"]), int(one["version"])) for one in several]
        except (ValueError, KeyError, TypeError) as error:
            raise TableDamagedError(f"{path} is not a commit of Delta Lake ({error!r}).") from None
        return {int(app[1]): number for app, number in apps if app is not None}

    def _actions(self, partition: int) -> Iterator[Action]:
        """The actions for what is not published of a partition: several commits, or one compaction."""
        published = self._published.get(partition, 0)
        live = self._table.live(partition)
        if live.number <= published:
            return
        last, added, removed, changes = live.number, dict(live.files), set[str](), True
        if published:
            last, added, removed, changes = self._changes(partition, published, live.number)
        now = round(time.time() * 1000)
        for path in sorted(removed):
            yield {"remove": {"path": path, "deletionTimestamp": now, "dataChange": changes}}
        for path, file in added.items():
            hour = hour_of(path)
            yield {
                "add": {
                    "path": path,
                    "partitionValues": {"date": f"{hour:%Y-%m-%d}", "hour": f"{hour:%H}"},
                    "size": file.bytes,
                    "modificationTime": now,
                    "dataChange": changes,
                    "stats": json.dumps({"numRecords": file.rows}),
                }
            }
        yield {"txn": {"appId": f"osrdyne-{partition}", "version": last, "lastUpdated": now}}

    def _changes(self, partition: int, published: int, last: int) -> tuple[int, dict[str, DataFile], set[str], bool]:
        """What the next commits leave together: the last one, added and removed files, and whether rows change. A file
        that one of them adds and another removes is in neither."""
        added: dict[str, DataFile] = {}
        removed: set[str] = set()
        for number in range(published + 1, last + 1):
            commit = self._table.read(partition, number)
            # Programs that follow the table skip versions in which no row changes, so a compaction has its own.
            if (is_compaction := bool(commit.removed) and bool(commit.files)) and number > published + 1:
                return number - 1, added, removed, True
            added |= {file.path: file for file in commit.files}
            for path in commit.removed:
                if added.pop(path, None) is None and not path.startswith(INVALID_EVENTS):
                    removed.add(path)
            if is_compaction:
                return number, added, removed, False
        return last, added, removed, True

    def _write(self, version: int, actions: list[Action]) -> None:
        """Write a version, unless another worker has written it."""
        now = round(time.time() * 1000)
        head: list[Action] = [{"commitInfo": {"timestamp": now, "operation": "WRITE", "engineInfo": "osrdyne"}}]
        if version == 0:
            head += [{"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}}, {"metaData": _metadata(now)}]
        unfinished = self._directory / f".{version:020d}-{uuid.uuid4().hex}.tmp"
        with storage_errors(self._table.directory):
            if not self._directory.is_dir():
                self._directory.mkdir(exist_ok=True)
                fsync_directory(self._table.directory)
            self._remove_unfinished(version)
            try:
                with unfinished.open("x", encoding="utf-8") as file:
                    file.writelines(json.dumps(action) + "\n" for action in (*head, *actions))
                    file.flush()
                    os.fsync(file.fileno())
                # The other worker may also have removed our unfinished version.
                with suppress(FileExistsError, FileNotFoundError):
                    os.link(unfinished, self._directory / f"{version:020d}.json")
            finally:
                with suppress(OSError):
                    unfinished.unlink()
            fsync_directory(self._directory)

    def _remove_unfinished(self, version: int) -> None:
        """Remove what a killed worker has left."""
        for path in self._directory.glob(".*.tmp"):
            if path.name[1:21].isdecimal() and int(path.name[1:21]) <= version:
                path.unlink(missing_ok=True)


def _metadata(now: int) -> Action:
    return {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps(SCHEMA),
        "partitionColumns": list(_PARTITION_COLUMNS),
        "configuration": {},
        "createdTime": now,
    }
