"""Copies of messages are found across ingests and within one, by key and message id."""

from datetime import timedelta
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stored_telemetry import START, compact, hour

from osrdyne.amqp.stream_frames import StreamMessage
from osrdyne_sources.rabbit_stream.rows import to_batch
from osrdyne_worker.pipelines.telemetry.copies import IDS, Copies, find_copies, message_ids
from osrdyne_worker.pipelines.telemetry.data_files import WriteRange
from osrdyne_worker.pipelines.telemetry.ranges import Range, store
from osrdyne_worker.pipelines.telemetry.table import StorageError, Table

WINDOW = 600
Sent = tuple[float, str | None]
"""When, in seconds from START, and the message id; "!": not JSON."""


class Log:
    """Stores messages one ingest after the other."""

    def __init__(self, directory: Path, mode: Literal["drop", "mark"] = "drop") -> None:
        self.table, self.mode = Table(directory), mode
        self.end = 0

    def ingest(self, *sent: Sent, key: str = "k") -> dict[int, int]:
        """The copies that were found: their offsets, and those of the first messages."""
        messages = [
            StreamMessage(
                self.end + number,
                "",
                "P-log-0",
                b"{" if name == "!" else b'[{"series": "a"}, {"series": "b"}, 3]',
                {"x-osrdyne-key": key, "x-osrdyne-enqueued": START + int(1000 * at)},
                message_id=name,
            )
            for number, (at, name) in enumerate(sent)
        ]
        batch = to_batch("P-log-0", messages)
        found = self.find(pa.Table.from_batches(message_ids(iter([batch])), IDS))
        number = self.table.live(0).number + 1
        wanted = Range(number, self.end, self.end + len(sent), self.end + len(sent))
        task = WriteRange(str(self.table.directory), 0, number, found.applied)
        results = [one.column(0)[0].as_py() for one in task(iter([batch]))]
        store(self.table, wanted, results, partition=0, copies=len(found))
        self.end = wanted.stop
        return pairs(found)

    def find(self, ids: pa.Table) -> Copies:
        return find_copies(self.table.directory, self.table.live(0), ids, mode=self.mode, window=WINDOW)

    def rows(self, *, invalid: bool = False) -> dict[int, list[int | None]]:
        """By offset: `copy_of` of each row."""
        found: dict[int, list[int | None]] = {}
        for path in self.table.files(invalid=invalid):
            columns = pq.read_table(path, partitioning=None).select(["offset", "copy_of"]).to_pydict()
            for offset, original in zip(columns["offset"], columns["copy_of"], strict=True):
                found.setdefault(offset, []).append(original)
        return dict(sorted(found.items()))


def pairs(copies: Copies) -> dict[int, int]:
    return dict(zip(copies.offsets.to_pylist(), copies.originals.to_pylist(), strict=True))


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path)


@pytest.mark.proves("telemetry-tables/message-log-twice-one")
def test_copy_is_dropped_whether_the_first_is_in_the_same_ingest_or_an_earlier_one(log):
    assert log.ingest((0, "a"), (1, "b"), (2, "a")) == {2: 0}
    assert log.ingest((3, "c"), (4, "b"), (5, "a"), (6, "a")) == {4: 1, 5: 0, 6: 0}
    assert log.rows() == {offset: [None, None] for offset in (0, 1, 3)}
    assert log.rows(invalid=True) == {offset: [None] for offset in (0, 1, 3)}
    assert Table(log.table.directory).live(0).copies == 4


def test_copies_have_the_key_and_message_id_of_a_message_that_was_kept_within_the_window(log):
    assert log.ingest((0, "a"), (WINDOW, "a"), (WINDOW + 0.001, "a")) == {1: 0}
    assert log.ingest((2 * WINDOW, "a"), (2 * WINDOW, None), (2 * WINDOW, "")) == {3: 2}
    assert log.ingest((2 * WINDOW, None), (2 * WINDOW, ""), (2 * WINDOW, "A")) == {}
    assert log.ingest((2 * WINDOW, "a"), key="other") == {}
    assert log.ingest((3 * WINDOW, "a")) == {}


def test_copies_are_marked_with_the_offset_of_the_first(tmp_path):
    log = Log(tmp_path, "mark")
    log.ingest((0, "a"), (0, "b"))
    log.ingest((WINDOW, "a"))
    # A marked copy does not begin a window.
    log.ingest((WINDOW + 1, "a"))
    assert log.rows() == {0: [None, None], 1: [None, None], 2: [0, 0], 3: [None, None]}
    assert log.rows(invalid=True) == {0: [None], 1: [None], 2: [0], 3: [None]}


def test_invalid_messages_and_compacted_hours_are_known(log):
    log.ingest((3_000, "a"), (3_000, "!"))
    log.ingest((3_599, "b"))
    log.ingest((7_200, "c"))
    assert compact(log.table) is not None
    again = Log(log.table.directory)
    again.end = log.end
    assert again.ingest((3_600, "!"), (3_600, "a"), (3_601, "b")) == {4: 1, 5: 0, 6: 2}


def test_only_hours_of_the_window_are_read(log):
    log.ingest((0, "a"))
    (log.table.directory / next(iter(log.table.live(0).files))).unlink()
    assert log.ingest((3_600 + WINDOW, "a")) == {}
    with pytest.raises(StorageError, match="cannot be used"):
        log.ingest((3_600 + WINDOW - 1, "a"))


def test_messages_without_a_time_are_no_copies(log):
    ids = pa.Table.from_pylist([{"key": "k", "message_id": "a", "offset": one} for one in range(2)], IDS)
    assert pairs(log.find(ids)) == {}
    times = [hour(0), hour(0) - timedelta(seconds=1)]
    assert pairs(log.find(ids.set_column(2, "enqueued", pa.array(times, IDS.field("enqueued").type)))) == {1: 0}
