"""A table that has reached its limit loses its oldest hours or stores nothing more, and one with a retention loses
what is older. No error of that is an error of the ingest."""

import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from stored_telemetry import HOUR, START, commit_file, events, ingest, next_of, stored, worker_of, write

from osrdyne_worker.pipelines.ingest import make_room, remove_old_events
from osrdyne_worker.pipelines.telemetry.live_files import DataFile
from osrdyne_worker.pipelines.telemetry.ranges import store
from osrdyne_worker.pipelines.telemetry.storage_limits import StorageLimitError, Usage, check_limit, purge, usage_of
from osrdyne_worker.pipelines.telemetry.table import Commit, CommitConflictError, Table

DAY = 86_400
ROWS = 3
"""Rows of each hour: two events and an invalid one."""


@pytest.fixture
def table(table):
    """Six hours with one message each."""
    ingest(table, end=6, step=HOUR)
    return table


@pytest.fixture
def days(tmp_path):
    """Four days with one message each."""
    table = Table(tmp_path / "days")
    ingest(table, end=4, step=DAY * 1_000)
    return table


def limit(**settings: Any) -> Any:
    return worker_of(Table(Path("/cold")), **settings).config.tables["cold"].storage_limit


@pytest.mark.parametrize(
    ("max_rows", "first"), [(19, 0), (18, 1), (16, 1), (15, 2), (7, 4), (6, 5), (3, 5), (1, 5), (None, 0)]
)
@pytest.mark.proves("telemetry-tables/table-reaches-storage-limit")
def test_oldest_hours_are_purged_until_the_table_is_below_its_limit(table, max_rows, first):
    rule = limit(max_rows=max_rows, on_storage_limit="purge")
    check_limit(table, rule)
    assert purge(table, rule, partition=0) == ROWS * first
    assert stored(table) == events(first, 6)
    assert usage_of(table).rows == ROWS * (6 - first)
    assert purge(table, rule, partition=0) == 0
    assert Table(table.directory).live(0).purged == ROWS * first


def test_bytes_are_limited(table):
    usage = usage_of(table)
    assert usage == Usage(6 * ROWS, sum(path.stat().st_size for path in table.directory.rglob("*.parquet")))
    assert purge(table, limit(max_bytes=usage.bytes + 1, on_storage_limit="purge"), partition=0) == 0
    assert purge(table, limit(max_bytes=usage.bytes, on_storage_limit="purge"), partition=0) == ROWS
    assert stored(table) == events(1, 6)


def test_limit_is_of_all_partitions_together(table):
    """The other partition has the hours after those of this one."""
    path = next(iter(table.live(0).files.values()))
    later = path.path.replace("date=2026-11-22", "date=2027-01-01")
    table.commit(Commit(1, 1, 0, 9, [DataFile(later, 12, 100)]))
    assert purge(table, limit(max_rows=22, on_storage_limit="purge"), partition=1) == 3 * ROWS
    assert sorted(one.rpartition("hour=")[2][:2] for one in table.live(0).files) == ["13", "14", "15"]
    assert list(table.live(1).files) == [later]
    assert (table.live(0).purged, table.live(1).purged) == (3 * ROWS, 0)


@pytest.mark.proves("telemetry-tables/purge-removes-hours-partition")
def test_purge_leaves_an_ingest_that_is_at_work_to_the_next_one(table):
    wanted = next_of(table, end=7)
    results = write(table, wanted, step=HOUR)
    assert purge(table, limit(max_rows=18, on_storage_limit="purge"), partition=0) == ROWS
    with pytest.raises(CommitConflictError):
        store(table, wanted, results, partition=0)
    ingest(table, end=7, step=HOUR)
    assert stored(table) == events(1, 7)


def test_purge_that_another_commit_overtakes_removes_nothing(table, monkeypatch):
    rule = limit(max_rows=18, on_storage_limit="purge")
    with monkeypatch.context() as patched:
        patched.setattr(Table, "replace_files", Mock(side_effect=CommitConflictError("another ingest was first")))
        assert purge(table, rule, partition=0) == 0
    assert purge(table, rule, partition=0) == ROWS


@pytest.mark.proves("telemetry-tables/table-reaches-storage-limit")
def test_paused_table_stores_nothing_until_it_is_below_its_limit(table):
    rule = limit(max_rows=18)
    with pytest.raises(StorageLimitError, match="18 rows"):
        check_limit(table, rule)
    assert purge(table, rule, partition=0) == 0
    check_limit(table, limit(max_rows=19))
    check_limit(table, limit())
    with pytest.raises(StorageLimitError, match="100 rows and 10 bytes"):
        check_limit(table, limit(max_rows=100, max_bytes=10))


@pytest.mark.parametrize(("kept", "first"), [(None, 0), (2, 1), (1, 2)])
def test_events_are_kept_for_the_retention(days, monkeypatch, kept, first):
    monkeypatch.setattr(time, "time", lambda: START / 1_000 + 3 * DAY + 3_599)
    remove_old_events(worker_of(days, retention_days=kept))
    assert stored(days) == events(first, 4)


@pytest.mark.proves("telemetry-tables/retention-table-cannot-remove")
def test_table_that_refuses_the_removal_is_no_error(days):
    commit_file(days, 1).write_text("{}")
    worker = worker_of(days, retention_days=1)
    remove_old_events(worker)
    assert worker.expired_at > 0


@pytest.mark.proves("telemetry-tables/table-reaches-storage-limit")
def test_paused_table_continues_when_its_old_events_are_gone(days, monkeypatch):
    worker = worker_of(days, retention_days=2, max_rows=usage_of(days).rows)
    monkeypatch.setattr(time, "time", lambda: START / 1_000)
    with pytest.raises(StorageLimitError):
        make_room(worker)
    monkeypatch.setattr(time, "time", lambda: START / 1_000 + 3 * DAY + 3_599)
    assert make_room(worker) == 0
    assert stored(days) == events(1, 4)
