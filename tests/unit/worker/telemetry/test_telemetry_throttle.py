"""The throttle of a table: the examples of the seed to the message, and a rate that no sequence of events exceeds."""

import math
import os
import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from osrdyne.amqp.stream_frames import StreamMessage
from osrdyne.protocol.rates import EventRate
from osrdyne_worker.pipelines.ingest import TableConfig
from osrdyne_worker.pipelines.telemetry import throttle
from osrdyne_worker.pipelines.telemetry.ranges import Range
from osrdyne_worker.pipelines.telemetry.table import CommitConflictError, StorageError, TableDamagedError
from osrdyne_worker.pipelines.telemetry.throttle import CAPACITY, PAUSE, Allowed, Bucket, Cost, ThrottleLog, next_after

S1 = EventRate(720, 1024)
BEGIN = 1_795_341_600.0
LARGEST = 40


@pytest.fixture(autouse=True)
def without_disk(monkeypatch):
    """What is on disk after a power failure is not the subject here, and takes most of the time."""
    monkeypatch.setattr(throttle.os, "fsync", lambda descriptor: None)


class Table:
    """A table whose partitions get messages, and ingests of it. `costs`: the blocks of each message; `times`: when it
    arrived."""

    def __init__(self, directory: Path, partitions: int = 1, rate: EventRate = S1) -> None:
        self.log = ThrottleLog(directory)
        self.rate = rate
        self.now = BEGIN
        self.skew = 0.0
        self.costs: list[list[int]] = [[] for _ in range(partitions)]
        self.times: list[list[float]] = [[] for _ in range(partitions)]
        self.stored = [0] * partitions
        self.blocks = 0

    def arrive(self, blocks: int, *, at: float, partition: int = 0, messages: int = 1) -> None:
        self.costs[partition] += [blocks] * messages
        self.times[partition] += [at] * messages

    def load(self, messages_a_minute: int, events: list[int]) -> None:
        """An hour of messages at even distances, with the next number of events of one block each."""
        for number in range(messages_a_minute * 60):
            self.arrive(events[number % len(events)], at=BEGIN + number * 60 / messages_a_minute)

    def unread(self, partition: int = 0) -> int:
        """Blocks that have arrived and are not stored."""
        return sum(self.costs[partition][self.stored[partition] : bisect_right(self.times[partition], self.now)])

    def take(self, partition: int = 0, *, size: int = 10**9) -> Allowed:
        """An ingest up to the moment when its blocks are taken."""
        start = self.stored[partition]
        end = bisect_right(self.times[partition], self.now)
        wanted = Range(1, start, min(end, start + size), end)

        def costs() -> Iterator[Cost]:
            for offset in range(wanted.start, wanted.stop):
                yield Cost(offset, self.costs[partition][offset], self.times[partition][offset])

        clock = self.now + self.skew
        return self.log.take(wanted, costs(), partition=partition, rate=self.rate, time=lambda: clock)

    def ingest(self, partition: int = 0) -> float:
        """A whole ingest; the seconds after which the next one is due."""
        allowed = self.take(partition)
        self.blocks += sum(self.costs[partition][self.stored[partition] : allowed.stop])
        self.stored[partition] = allowed.stop
        return next_after(allowed.free_at, self.now + self.skew) if self.unread(partition) else 45.0


@pytest.fixture
def table(tmp_path):
    return Table(tmp_path)


@pytest.mark.parametrize(
    ("messages_a_minute", "events"), [(277, [2, 3]), (720, [1])], ids=["277 messages of 2.5 events", "720 of one"]
)
def test_table_that_gets_its_rate_never_lags(tmp_path, messages_a_minute, events):
    table = Table(tmp_path)
    table.load(messages_a_minute, events)
    while table.now < BEGIN + 3600:
        table.now += 45.0
        table.ingest()
        assert table.unread() <= max(events)


def test_table_that_gets_more_falls_behind_by_the_difference(table):
    table.load(200, [4])
    table.now += 30.0
    while table.now < BEGIN + 3600:
        pause = table.ingest()
        minutes = (table.now - BEGIN) / 60
        assert table.unread() == pytest.approx(80 * minutes, abs=9)  # two messages
        assert table.blocks == pytest.approx(720 * minutes, abs=5)  # one message
        assert PAUSE <= pause < PAUSE + 1
        table.now += pause
    assert table.unread() > 4_700


def test_large_message_is_stored_as_a_whole_and_paid_for_afterwards(table):
    table.arrive(7200, at=BEGIN)
    table.arrive(1, at=BEGIN)
    table.now += 1
    assert table.ingest() == pytest.approx(600 - 1 + PAUSE)
    assert (table.stored, table.blocks) == ([1], 7200)
    table.now += 598
    assert table.ingest() == pytest.approx(1 + PAUSE)
    table.now += 1
    table.ingest()
    assert table.stored == [2]


@pytest.mark.proves("telemetry-tables/worker-dies-taken-blocks")
def test_killed_ingest_has_taken_its_blocks_once(table):
    table.load(800, [1])
    table.now += 30.0
    first = table.take()
    assert first.blocks == pytest.approx(360, abs=1)
    assert table.take() == first
    assert table.take(size=10).blocks == 10
    table.ingest()
    assert table.blocks == first.blocks
    assert table.take().blocks == 0
    table.now += 30.0
    table.ingest()
    assert table.blocks == pytest.approx(720, abs=1)


STEPS = st.one_of(
    st.tuples(st.just("wait"), st.floats(0.0, 300.0)),
    st.tuples(st.just("jump"), st.floats(-7200.0, 7200.0)),
    st.tuples(st.just("ingest"), st.integers(0, 1)),
    st.tuples(st.just("killed"), st.integers(0, 1)),
)


@example(steps=[("wait", 60.0), ("killed", 0), ("wait", 60.0), ("ingest", 1), ("ingest", 0)], sizes=[1])
@given(steps=st.lists(STEPS, max_size=40), sizes=st.lists(st.integers(1, LARGEST), min_size=1, max_size=5))
@pytest.mark.proves("telemetry-tables/clock-worker-jumps-differs", "telemetry-tables/worker-dies-taken-blocks")
def test_no_sequence_of_kills_and_clock_jumps_exceeds_the_rate(steps, sizes):
    with tempfile.TemporaryDirectory() as directory:
        table = Table(Path(directory), partitions=2)
        table.costs = [sizes * 20_000, sizes * 20_000]
        table.times = [[-math.inf] * len(one) for one in table.costs]
        stored, forward = [(BEGIN, 0, 0)], 0
        for step, value in steps:
            if step == "wait":
                table.now += value
            elif step == "jump":
                table.skew += value
                forward += value > 0
            elif step == "ingest":
                table.ingest(int(value))
            else:
                table.take(int(value))
            stored.append((table.now, table.blocks, forward))
        for (at, blocks, jumps), (later, more, further) in combinations(stored, 2):
            # A clock that is set forward saves up at most what the bucket holds.
            full = (1 + further - jumps) * (12 * CAPACITY + LARGEST)
            assert more - blocks <= 12 * (later - at) + full


def test_two_ingests_at_once_take_one_after_the_other(tmp_path, monkeypatch):
    table = Table(tmp_path, partitions=2)
    for partition in (0, 1):
        table.arrive(1, at=BEGIN - 60, partition=partition, messages=1_000)
    table.arrive(1, at=BEGIN - 60)
    table.ingest()
    table.now += 30.0
    last, others = table.log.last, [1]

    def read_before_another_writes():
        found = last()
        if others:
            table.ingest(others.pop())
        return found

    monkeypatch.setattr(table.log, "last", read_before_another_writes)
    table.ingest(0)
    assert table.blocks == pytest.approx(720 + 360, abs=2)


def test_entries_are_removed_and_a_slow_ingest_does_not_use_their_numbers_again(table, tmp_path):
    table.load(60, [1])
    for _ in range(100):
        table.ingest()
        table.now += 1.0
    directory = tmp_path / throttle.THROTTLE
    entries = sorted(path.name for path in directory.iterdir())
    assert 1 < len(entries) <= 17
    assert not table.log._write(Bucket(3, 0.0, 0.0, 720.0))
    assert sorted(path.name for path in directory.iterdir()) == entries


def test_entry_of_a_killed_ingest_is_removed_with_its_number(tmp_path, monkeypatch):
    table = Table(tmp_path)
    table.arrive(1, at=BEGIN - 60, messages=2_000)
    table.ingest()
    directory = tmp_path / throttle.THROTTLE
    killed, at_work = (directory / f".{number:020d}-{number:032x}.tmp" for number in (2, 3))
    for path in (killed, at_work):
        path.write_text("{")
    table.now += 30.0
    table.ingest()
    assert [path.name for path in directory.glob(".*.tmp")] == [at_work.name]

    link = os.link

    def link_after_another_ingest(unfinished, path):
        """The other one takes the number, and removes our unfinished entry."""
        monkeypatch.setattr(throttle.os, "link", link)
        table.log._write(Bucket(3, BEGIN, BEGIN, 720.0))
        link(unfinished, path)

    table.now += 30.0
    monkeypatch.setattr(throttle.os, "link", link_after_another_ingest)
    table.ingest()
    assert sorted(path.name for path in directory.iterdir()) == [f"{number:020d}.json" for number in (1, 2, 3, 4)]


@pytest.mark.parametrize(("is_removed", "error"), [(False, CommitConflictError), (True, StorageError)])
def test_ingest_that_cannot_write_its_entry_fails(table, monkeypatch, is_removed, error):
    def link(unfinished, path):
        if is_removed:
            shutil.rmtree(unfinished.parent)
        raise FileNotFoundError if is_removed else FileExistsError

    table.arrive(1, at=BEGIN)
    monkeypatch.setattr(throttle.os, "link", link)
    with pytest.raises(error):
        table.ingest()


@pytest.mark.parametrize(
    ("body", "blocks"),
    [
        (b'[{"series": "a"}, {"series": "b"}]', 2),
        (b'{"events": [{"series": "a"}, {"series": "b"}, {"series": "c"}]}', 3),
        (b"[" + b'{"series": "%b"}' % (b"x" * 1500) + b', {"series": "b"}]', 3),
        (b"x" * 100_000, 32),
        (b"[]", 1),
    ],
    ids=["array", "list of events", "2 blocks and 1", "larger than an event", "empty"],
)
def test_message_costs_the_blocks_of_its_events(body, blocks):
    message = StreamMessage(7, "", "P-log-0", body, {"x-osrdyne-enqueued": 1_500})
    assert Cost.of(message, S1) == Cost(7, blocks, 1.5)


@pytest.mark.proves("telemetry-tables/entry-throttle-log-damaged")
def test_damaged_entry_is_named_with_its_remedy(table, tmp_path):
    table.load(2_000, [1])
    for _ in range(2):
        table.now += 30.0
        table.ingest()
    newest = max((tmp_path / throttle.THROTTLE).iterdir())
    for text in ("{", "[]", '{"format": 2}', newest.read_text().replace(": 720", ": NaN")):
        newest.write_text(text)
        with pytest.raises(TableDamagedError, match=r"00002\.json"):
            table.ingest()
    newest.unlink()
    table.ingest()


def test_rate_of_a_table_is_that_of_its_preset_or_of_the_request():
    table = TableConfig(directory="/data", preset="store-s2", units=3, catch_up=1.5)
    assert table.rate(None) == EventRate(7200 * 3 * 1.5, 1024)
    assert table.rate(EventRate(1440, 512).to_wire()) == EventRate(2160, 512)
    assert TableConfig(directory="/data").rate(None) is None
