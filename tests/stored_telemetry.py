"""Ingests of telemetry without Spark and RabbitMQ: the same tasks and commits, of messages made up here."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from osrdyne.amqp.stream_frames import StreamMessage
from osrdyne_sources.rabbit_stream.rows import to_batch
from osrdyne_worker.pipelines.ingest import Ingest, parse_config
from osrdyne_worker.pipelines.telemetry.compaction import (
    INVALID_SORTED_BY,
    SORTED_BY,
    Compaction,
    WriteSorted,
    commit_compaction,
    plan_compaction,
)
from osrdyne_worker.pipelines.telemetry.data_files import WriteRange
from osrdyne_worker.pipelines.telemetry.ranges import Range, next_range, store
from osrdyne_worker.pipelines.telemetry.table import Commit, Table

START = 1_795_341_600_000
MINUTES = 60_000
HOUR = 60 * MINUTES


def messages(start: int, stop: int, *, step: int = 1_000) -> list[StreamMessage]:
    """A message for each offset, with two events and an invalid one."""
    return [
        StreamMessage(
            offset,
            "",
            "P-log-0",
            b'[{"series": "a"}, {"series": "b"}, 3]',
            {"x-osrdyne-key": "k", "x-osrdyne-enqueued": START + offset * step},
        )
        for offset in range(start, stop)
    ]


def write(table: Table, wanted: Range, *, step: int = 1_000) -> list[str]:
    """What two tasks do with a range."""
    task = WriteRange(str(table.directory), 0, wanted.number)
    middle = (wanted.start + wanted.stop) // 2
    return [
        batch.column(0)[0].as_py()
        for first, last in ((wanted.start, middle), (middle, wanted.stop))
        for batch in task(iter([to_batch("P-log-0", messages(first, last, step=step))]))
    ]


def next_of(table: Table, *, end: int, first: int = 0, most: int = 100, loss: bool = True) -> Range:
    return next_range(table.last_commit(0), (first, end), stream="P-log-0", max_offsets=most, fail_on_data_loss=loss)


def ingest(table: Table, *, end: int, step: int = 1_000) -> Commit:
    wanted = next_of(table, end=end)
    return store(table, wanted, write(table, wanted, step=step), partition=0)


def compact(table: Table, *, max_hours: int = 100) -> Commit | None:
    """What the tasks of a compaction do, with one task for events and one for invalid events."""
    plan = plan_compaction(table.live(0), max_hours=max_hours)
    return commit_compaction(table, plan, merge(table, plan), partition=0) if plan.hours else None


def merge(table: Table, plan: Compaction) -> list[str]:
    results = []
    kinds = ((False, plan.files, SORTED_BY), (True, plan.invalid_files, INVALID_SORTED_BY))
    for invalid, files, columns in kinds:
        if files:
            several = [pq.read_table(table.directory / one.path, partitioning=None) for one in files]
            hours = pc.floor_temporal(pa.concat_tables(several)["enqueued"], unit="hour")
            rows = pa.concat_tables(several).append_column("hour", hours)
            rows = rows.sort_by([(column, "ascending") for column in ("hour", *columns)]).drop_columns("hour")
            task = WriteSorted(str(table.directory), 0, plan.number, invalid)
            results += [batch.column(0)[0].as_py() for batch in task(iter(rows.to_batches(max_chunksize=7)))]
    return results


def stored(table: Table) -> list[tuple[int, int]]:
    rows = []
    for path in table.files():
        columns = pq.read_table(path, partitioning=None).select(["offset", "index"]).to_pydict()
        rows += list(zip(columns["offset"], columns["index"], strict=True))
    return sorted(rows)


def on_disk(table: Table) -> set[str]:
    return {str(path) for path in table.directory.rglob("*.parquet")}


def committed(table: Table) -> set[str]:
    return {*table.files(), *table.files(invalid=True)}


def events(start: int, stop: int) -> list[tuple[int, int]]:
    return [(offset, index) for offset in range(start, stop) for index in (0, 1)]


def delta_files(table: Table) -> dict[str, int]:
    """The paths and rows of the files in the newest version of a Delta table, as its readers find them."""
    files: dict[str, int] = {}
    for path in sorted((table.directory / "_delta_log").glob("*.json")):
        for action in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            if "add" in action:
                assert action["add"]["path"] not in files
                files[action["add"]["path"]] = json.loads(action["add"]["stats"])["numRecords"]
            if "remove" in action:
                del files[action["remove"]["path"]]
    return files


def live_files(table: Table) -> dict[str, int]:
    return {one.path: one.rows for partition in table.partitions() for one in table.live(partition).files.values()}


@contextmanager
def refusing_writes(table: Table) -> Iterator[None]:
    """The directory of the table is away, and what stands in its place is none: this refuses root as well."""
    away = table.directory.with_name("away")
    table.directory.rename(away)
    table.directory.write_text("not a directory")
    try:
        yield
    finally:
        table.directory.unlink()
        away.rename(table.directory)


def hour(number: int) -> datetime:
    """The beginning of an hour; that of the first message is 0."""
    return datetime.fromtimestamp(START / 1000, UTC) + timedelta(hours=number)


def commit_file(table: Table, number: int, partition: int = 0) -> Path:
    return table.directory / "_commits" / str(partition) / f"{number:020d}.json"


def worker_of(table: Table, **settings: object) -> Ingest:
    """The worker of partition 0 of the table `cold`, which has these settings."""
    tables = {"cold": {"directory": str(table.directory), **settings}}
    config: dict[str, Any] = {"uri_file": "/uri", "management_uri_file": "/uri", "tables": tables}
    return Ingest(parse_config(config), "P", "cold", 0, table)
