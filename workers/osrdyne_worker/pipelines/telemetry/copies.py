"""Finds copies of messages: those with the key and message id of a message that the table has. No Spark session.

A client or the ingress may write a message a second time, with the same message id. All messages of a key are in one
partition of the log, so both are in the same partition of the table. Source: docs/reference/telemetry/copies.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from osrdyne_worker.pipelines.telemetry.events import Parsed, identify
from osrdyne_worker.pipelines.telemetry.live_files import LiveFiles
from osrdyne_worker.pipelines.telemetry.table import hour_of, storage_errors

_TIME = pa.timestamp("us", tz="UTC")
IDS = pa.schema([("key", pa.string()), ("message_id", pa.string()), ("enqueued", _TIME), ("offset", pa.int64())])
"""What identifies a message of a partition."""
_STORED = IDS.append(pa.field("copy_of", pa.int64()))


@dataclass(frozen=True)
class Copies:
    """Messages that are copies: their offsets, and for each one the offset of the first message."""

    mode: Literal["drop", "mark"]
    offsets: pa.Int64Array
    originals: pa.Int64Array

    def __len__(self) -> int:
        return len(self.offsets)

    def applied(self, parsed: Parsed) -> Parsed:
        """Drop the rows of copies, or mark them."""
        return Parsed(self._applied(parsed.events), self._applied(parsed.invalid))

    def _applied(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        places = pc.index_in(rows.column("offset"), value_set=self.offsets)
        if self.mode == "drop":
            return rows.filter(pc.is_null(places))
        return rows.set_column(rows.schema.get_field_index("copy_of"), "copy_of", self.originals.take(places))


def message_ids(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The function of a Spark task: what identifies each message."""
    for batch in batches:
        yield identify(batch).cast(IDS)


def find_copies(
    directory: Path, live: LiveFiles, ids: pa.Table, *, mode: Literal["drop", "mark"], window: int
) -> Copies:
    """Find the messages of the next range (`ids`) that are copies of a message in the table or earlier in the range.
    `window`: seconds after the message that is kept. Raises `StorageError`."""
    ids = ids.filter(pc.and_(pc.greater(pc.binary_length(ids["message_id"]), 0), pc.is_valid(ids["enqueued"])))
    if ids.num_rows == 0:
        return _copies(mode, {})
    known = _stored(directory, live, ids, since=pc.min(ids["enqueued"]).as_py() - timedelta(seconds=window))
    both = pa.concat_tables([known, ids])
    several = both.group_by(["key", "message_id"]).aggregate([("offset", "count")])
    several = several.filter(pc.greater(several["offset_count"], 1)).select(["key", "message_id"])
    rows = both.join(several, ["key", "message_id"], join_type="inner").sort_by("offset").to_pylist()
    first_new = pc.min(ids["offset"]).as_py()
    kept: dict[tuple[str, str], dict[str, Any]] = {}
    found: dict[int, int] = {}
    for row in rows:
        name = (row["key"], row["message_id"])
        earlier = kept.get(name)
        is_copy = earlier is not None and row["enqueued"] - earlier["enqueued"] <= timedelta(seconds=window)
        if earlier is not None and is_copy and row["offset"] >= first_new:
            found[row["offset"]] = earlier["offset"]
        else:
            kept[name] = row
    return _copies(mode, found)


def _copies(mode: Literal["drop", "mark"], found: Mapping[int, int]) -> Copies:
    return Copies(mode, pa.array(list(found), pa.int64()), pa.array(list(found.values()), pa.int64()))


def _stored(directory: Path, live: LiveFiles, ids: pa.Table, *, since: datetime) -> pa.Table:
    """Messages of the table with the same ids that are not older than a time and are no copies themselves."""
    hour = since.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    names = [str(directory / path) for path in (*live.files, *live.invalid_files) if hour_of(path) >= hour]
    batches: list[pa.RecordBatch] = []
    with storage_errors(directory):
        for name in names:
            batches += _matching(name, ids["message_id"], since)
    table = pa.Table.from_batches(batches, IDS)
    # One row for each message, not for each event.
    return table.group_by(IDS.names).aggregate([]).select(IDS.names).cast(IDS)


def _matching(name: str, wanted: pa.ChunkedArray, since: datetime) -> Sequence[pa.RecordBatch]:
    """Read batch by batch: a file may be larger than the memory."""
    found = ds.dataset(name, schema=_STORED, format="parquet").scanner(
        columns=_STORED.names, filter=(ds.field("enqueued") >= since) & ds.field("copy_of").is_null()
    )
    values = pc.unique(wanted)
    return [
        rows.select(IDS.names)
        for batch in found.to_batches()
        if len(rows := batch.filter(pc.is_in(batch.column("message_id"), value_set=values)))
    ]
