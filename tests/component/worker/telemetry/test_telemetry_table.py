"""A table holds each event once, and only what a commit names."""

import hashlib
import json
import os
import pickle
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from stored_telemetry import HOUR, START, commit_file, committed, events, hour, ingest, next_of, on_disk, stored, write

from osrdyne.amqp.stream_frames import StreamMessage
from osrdyne.errors import StreamDataLostError
from osrdyne.protocol.event_mapping import mapping_from_settings
from osrdyne_sources.rabbit_stream.rows import to_batch
from osrdyne_worker.pipelines.telemetry import table as tables
from osrdyne_worker.pipelines.telemetry.data_files import MAX_OPEN, WriteRange
from osrdyne_worker.pipelines.telemetry.ranges import Range, next_range, store
from osrdyne_worker.pipelines.telemetry.table import Commit, CommitConflictError, StorageError, Table, TableDamagedError


def test_ingests_continue_where_the_last_commit_ends(table):
    assert (table.positions(), table.files()) == ({}, [])
    commits = [ingest(table, end=150), ingest(table, end=150)]
    assert [(one.number, one.start, one.stop, one.rows, one.invalid) for one in commits] == [
        (1, 0, 100, 200, 100),
        (2, 100, 150, 100, 50),
    ]
    assert stored(table) == events(0, 150)
    assert list(table.commits(0)) == commits
    assert table.positions() == {0: 150}
    assert next_of(table, end=150) == Range(3, 150, 150, 150)
    assert committed(table) == on_disk(table)


def test_task_maps_messages_and_counts_old_events(table):
    body = b'{"a": 1, "b": 2, "ts": "1970-01-20"}'
    sent = StreamMessage(0, "", "P-log-0", body, {"x-osrdyne-key": "k", "x-osrdyne-enqueued": START})
    task = WriteRange(str(table.directory), 0, 1, mapping=mapping_from_settings({"preset": "flat"}))
    (result,) = pickle.loads(pickle.dumps(task))(iter([to_batch("P-log-0", [sent])]))  # as Spark sends it
    found = json.loads(result.column(0)[0].as_py())
    assert (found["old"], found["files"][0]["rows"]) == (2, 2)


def test_rows_are_in_the_directory_of_their_hour(table):
    ingest(table, end=2 * (MAX_OPEN + 2), step=HOUR)
    assert stored(table) == events(0, 2 * (MAX_OPEN + 2))
    for path in committed(table):
        times = pq.read_table(path, partitioning=None)["enqueued"].to_pylist()
        [directory] = {when.strftime("/date=%Y-%m-%d/hour=%H/") for when in times}
        assert directory in path


@pytest.mark.proves("telemetry-tables/two-ingests-one-partition")
def test_second_ingest_of_a_range_commits_nothing(table):
    ingest(table, end=10)
    wanted = next_of(table, end=20)
    ours, theirs = write(table, wanted), write(table, wanted)
    store(table, wanted, theirs, partition=0)
    before = on_disk(table)
    with pytest.raises(CommitConflictError, match="offsets from 10 of partition 0"):
        store(table, wanted, ours, partition=0)
    assert stored(table) == events(0, 20)
    # The winner has removed the uncommitted files of the loser, whose commit fails without them.
    assert on_disk(table) == before == committed(table)


@pytest.mark.proves("telemetry-tables/nfs-reports-commit-worker")
def test_commit_whose_link_is_reported_as_existing_is_a_commit(table, monkeypatch):
    """As over NFS, when the kernel asks again after a lost answer."""
    link = os.link

    def link_twice(unfinished, path):
        link(unfinished, path)
        link(unfinished, path)

    monkeypatch.setattr(tables.os, "link", link_twice)
    assert [ingest(table, end=end).number for end in (10, 20)] == [1, 2]
    assert stored(table) == events(0, 20)
    assert on_disk(table) == committed(table)


def test_directory_that_a_killed_ingest_has_made_is_written_to_disk(table, monkeypatch):
    (table.directory / "_commits" / "0").mkdir(parents=True)
    synced: list[Path] = []
    monkeypatch.setattr(tables, "fsync_directory", synced.append)
    ingest(table, end=10)
    assert {table.directory / "_commits", table.directory, table.directory.parent} <= set(synced)


def test_files_of_an_ingest_at_work_are_kept_until_it_cannot_commit(table):
    ingest(table, end=10)
    wanted = next_of(table, end=20)
    write(table, wanted)
    left = on_disk(table) - committed(table)
    assert left
    assert table.remove_uncommitted(0) == []
    table.commit(Commit(0, 2, 10, 20))
    assert {str(table.directory / one) for one in table.remove_uncommitted(0)} == left
    assert on_disk(table) == committed(table)


@contextmanager
def full_disk() -> Iterator[None]:
    """The kernel refuses to write files of more than 600 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("full_at", ["data", "commit"])
@pytest.mark.proves("telemetry-tables/disk-table-full-directory")
def test_data_or_commit_that_cannot_be_written_does_not_count(table, full_at):
    table.directory.write_text("a file")
    with pytest.raises(StorageError, match="Not a directory"):
        ingest(table, end=10)
    table.directory.unlink()
    ingest(table, end=10)
    wanted = next_of(table, end=20)
    with full_disk() if full_at == "data" else nullcontext():
        results = write(table, wanted)
    with full_disk() if full_at == "commit" else nullcontext(), pytest.raises(StorageError, match="File too large"):
        store(table, wanted, results, partition=0)
    assert (stored(table), table.positions()) == (events(0, 10), {0: 10})
    if full_at == "data":
        assert on_disk(table) == committed(table)
    ingest(table, end=20)
    assert stored(table) == events(0, 20)
    assert on_disk(table) == committed(table)


@pytest.mark.proves("telemetry-tables/retention-table-cannot-remove")
def test_expired_hours_leave_the_table_and_later_the_disk(table, monkeypatch):
    ingest(table, end=6, step=HOUR)  # six hours, with one message each
    before = on_disk(table)
    removal = table.expire(0, hour(2))
    assert removal is not None
    assert (removal.number, removal.start, removal.stop, len(removal.removed)) == (2, 6, 6, 4)
    assert stored(table) == events(2, 6)
    assert on_disk(table) == before
    assert table.expire(0, hour(2) + timedelta(minutes=59)) is None
    ingest(table, end=8, step=HOUR)
    # A program that listed the files less than an hour ago can still read them.
    second = table.expire(0, hour(3))
    assert second is not None
    assert stored(table) == events(3, 8)
    assert on_disk(table) >= before
    monkeypatch.setattr(time, "time", lambda: removal.at + tables.KEEP_REMOVED + 0.001)
    table.delete_removed(0)
    gone = {str(table.directory / path) for path in removal.removed}
    assert before - on_disk(table) - {str(table.directory / path) for path in second.removed} == gone
    assert table.remove_uncommitted(0) == []
    assert table.expire(0, hour(4)) is not None
    assert not set(removal.removed) & set(table.live(0).removed)
    assert table.positions() == {0: 8}


@pytest.fixture
def checkpoints(table, monkeypatch):
    """Those of a table with a checkpoint after the commits 3, 6 and 9, of ten."""
    monkeypatch.setattr(tables, "CHECKPOINT_INTERVAL", 3)
    for number in range(10):
        ingest(table, end=2 * number + 2, step=HOUR)
        if number == 4:
            table.expire(0, hour(2))
    return lambda: sorted(commit_file(table, 1).parent.glob("*.checkpoint"))


def test_readers_read_only_the_commits_after_a_checkpoint(table, checkpoints):
    assert [int(path.stem) for path in checkpoints()] == [6, 9]
    for number in range(1, 9):
        commit_file(table, number).write_text("not read")
    assert stored(Table(table.directory)) == events(2, 20)
    assert Table(table.directory).live(0) == table.live(0)
    assert table.remove_uncommitted(0) == []


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(None, id="missing"),
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(lambda content: content[: len(content) // 2], id="half"),
        pytest.param(lambda content: content.replace(b"hour=13", b"hour=14"), id="changed"),
        pytest.param(lambda content: b"[]\n" + hashlib.sha256(b"[]").hexdigest().encode(), id="another document"),
    ],
)
@pytest.mark.proves("telemetry-tables/checkpoint-table-damaged-deleted")
def test_damaged_and_missing_checkpoints_are_ignored_and_written_again(table, checkpoints, damage):
    for path in checkpoints():
        content = path.read_bytes()
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage(content))
            assert path.read_bytes() != content
    assert stored(Table(table.directory)) == events(2, 20)
    for end in (22, 24, 26):
        ingest(Table(table.directory), end=end, step=HOUR)
    assert 12 in [int(path.stem) for path in checkpoints()]
    assert stored(Table(table.directory)) == events(2, 26)


@pytest.mark.proves("telemetry-tables/commit-table-missing-cannot")
def test_missing_or_damaged_commit_is_an_error_unless_a_checkpoint_has_its_files(table, checkpoints):
    commit_file(table, 2).unlink()
    assert stored(Table(table.directory)) == events(2, 20)
    for path in checkpoints():
        path.unlink()
    with pytest.raises(TableDamagedError, match=r"2\.json is missing"):
        Table(table.directory).files()
    commit_file(table, 2).write_text("{}")
    with pytest.raises(TableDamagedError, match=str(commit_file(table, 2))):
        Table(table.directory).files()


@pytest.mark.proves("telemetry-tables/checkpoint-table-damaged-deleted")
def test_checkpoint_of_other_commits_is_ignored(table, checkpoints):
    """The commits were taken back to an earlier state, and the checkpoints were not."""
    other = Table(table.directory.with_name("other"))
    for number in range(10):
        ingest(other, end=3 * number + 3, step=HOUR)
    for path in checkpoints():
        shutil.copy(path, commit_file(other, 1).parent)
    assert stored(Table(other.directory)) == events(0, 30)


@pytest.mark.proves(
    "telemetry-tables/retention-removes-messages-ingest", "telemetry-tables/stream-deleted-declared-again"
)
def test_lost_offsets_are_an_error_unless_that_is_allowed(table):
    ingest(table, end=10)
    with pytest.raises(StreamDataLostError, match="10 to 24 of the stream P-log-0"):
        next_of(table, first=25, end=40)
    assert next_of(table, first=25, end=40, loss=False) == Range(2, 25, 40, 40)
    with pytest.raises(StreamDataLostError, match="P-log-0"):
        next_of(table, end=5, loss=False)


def test_stream_without_messages_has_nothing_to_store(table):
    options = {"stream": "P-log-0", "max_offsets": 100, "fail_on_data_loss": True}
    assert next_range(None, None, **options) == Range(1, 0, 0, 0)
    ingest(table, end=10)
    assert next_range(table.last_commit(0), None, **options) == Range(2, 10, 10, 10)
