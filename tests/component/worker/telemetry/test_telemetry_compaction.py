"""A compaction keeps every row, and replaces the files of an hour in one step."""

import math
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_telemetry import (
    HOUR,
    MINUTES,
    committed,
    compact,
    events,
    hour,
    ingest,
    merge,
    next_of,
    on_disk,
    stored,
    worker_of,
    write,
)

from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key
from osrdyne_worker import Call, Context, RequestError
from osrdyne_worker.pipelines import ingest as pipeline
from osrdyne_worker.pipelines.telemetry.compaction import SORTED_BY, commit_compaction, compact_within, plan_compaction
from osrdyne_worker.pipelines.telemetry.ranges import store
from osrdyne_worker.pipelines.telemetry.table import CommitConflictError, StorageError, Table, TableDamagedError


@pytest.fixture
def table(table):
    """Four hours in small files, of which three are closed."""
    for end in (2, 4, 6, 8):
        ingest(table, end=end, step=30 * MINUTES)
    return table


def test_closed_hours_have_one_sorted_file_each(table):
    before = set(table.files())
    commit = compact(table)
    assert commit is not None
    assert (commit.number, commit.start, commit.stop, len(commit.files), len(commit.invalid_files)) == (5, 8, 8, 3, 3)
    assert stored(table) == events(0, 8)
    for file in commit.files:
        rows = pq.read_table(table.directory / file.path, partitioning=None).select(SORTED_BY)
        assert rows.num_rows == file.rows == 4
        assert rows.equals(rows.sort_by([(column, "ascending") for column in SORTED_BY]))
    # Programs that have listed the earlier files can still read them.
    assert on_disk(table) > committed(table) | before
    assert table.remove_uncommitted(0) == []
    assert compact(table) is None
    assert ingest(table, end=9, step=30 * MINUTES).start == 8


@pytest.mark.parametrize(
    ("budget", "seconds", "hours", "left"),
    [(math.inf, 60, [1, 4, 4, 1], 0), (100, 30, [1, 2], 7), (100, 60, [1], 9), (0, 1, [1], 9), (9, 0, [1, 4, 4, 1], 0)],
)
@pytest.mark.proves("telemetry-tables/merging-all-closed-hours")
def test_compaction_of_an_ingest_ends_before_its_time_is_over(budget, seconds, hours, left):
    merged: list[int] = []

    def merge(most):
        merged.append(min(most, 10 - sum(merged)))
        return 10 - sum(merged)

    assert compact_within(budget, merge, max_hours=4, time=lambda: seconds * sum(merged)) == left
    assert merged == hours


@pytest.mark.proves("telemetry-tables/merging-all-closed-hours")
def test_hours_without_time_are_compacted_by_the_next_ingest(table, monkeypatch):
    worker = worker_of(table, compact_interval=3600)

    def unsorted():
        return plan_compaction(table.live(0), max_hours=9).hours

    def compact_some(session, ingest, hours):
        compact(table, max_hours=hours)
        return {"remaining_hours": unsorted()}

    monkeypatch.setattr(pipeline, "_compact", compact_some)
    left = [unsorted()]
    for _ in range(4):
        pipeline.compact_regularly(None, worker, budget=0.0)
        left.append(unsorted())
    assert left == [3, 2, 1, 0, 0]
    assert worker.compacted_at is not None
    assert stored(table) == events(0, 8)


@pytest.mark.proves("telemetry-tables/compaction-ingest-one-partition")
def test_ingest_that_commits_during_a_compaction_makes_it_fail(table):
    plan = plan_compaction(table.live(0), max_hours=9)
    results = merge(table, plan)
    ingest(table, end=10, step=30 * MINUTES)
    before = set(table.files())
    with pytest.raises(CommitConflictError):
        commit_compaction(table, plan, results, partition=0)
    assert set(table.files()) == before
    assert on_disk(table) == committed(table)


@pytest.mark.proves("telemetry-tables/compaction-ingest-one-partition")
def test_compaction_that_commits_during_an_ingest_makes_it_fail(table):
    wanted = next_of(table, end=10)
    results = write(table, wanted, step=30 * MINUTES)
    compact(table)
    with pytest.raises(CommitConflictError):
        store(table, wanted, results, partition=0)
    assert stored(table) == events(0, 8)
    ingest(table, end=10, step=30 * MINUTES)
    assert stored(table) == events(0, 10)


@pytest.mark.proves("telemetry-tables/file-merged-lost-rows")
def test_lost_rows_are_an_error_and_change_nothing(table):
    plan = plan_compaction(table.live(0), max_hours=9)
    results = merge(table, plan)
    before = table.live(0).number
    with pytest.raises(TableDamagedError, match="12 rows"):
        commit_compaction(table, plan, results[1:], partition=0)
    failed = [results[0], '{"errno": 28, "error": "No space left on device"}']
    with pytest.raises(StorageError, match="No space left on device"):
        commit_compaction(table, plan, failed, partition=0)
    assert (table.live(0).number, stored(table)) == (before, events(0, 8))
    assert on_disk(table) == committed(table)


@pytest.mark.parametrize("path", ["ingest", "replay", "compact"])
@pytest.mark.proves("telemetry-tables/compaction-ingest-one-partition")
def test_request_during_another_one_of_the_partition_is_refused(table, path):
    worker = worker_of(table)
    call = Call(Context(key=Key("cold/0"), state=worker), Request(key="cold/0", body=b""))
    with worker.busy, pytest.raises(RequestError) as refusal:
        getattr(pipeline, path)(call, getattr(pipeline, f"{path.title()}Request")())
    assert (refusal.value.code, refusal.value.error_code) == (409, "ingest_conflict")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ingest"), st.integers(1, 4), st.sampled_from([5 * MINUTES, 30 * MINUTES, HOUR])),
        st.tuples(st.just("compact"), st.integers(1, 3), st.none()),
        st.tuples(st.just("expire"), st.integers(0, 6), st.none()),
        st.tuples(st.just("restart"), st.none(), st.none()),
    ),
    max_size=12,
)


@settings(max_examples=30, deadline=None)
@given(STEPS)
@pytest.mark.proves("telemetry-tables/worker-dies-during-compaction")
def test_any_order_of_ingests_and_compactions_keeps_each_row_once(steps):
    with tempfile.TemporaryDirectory() as name:
        table, end, hours = Table(Path(name)), 0, {}
        for kind, number, step in steps:
            if kind == "ingest":
                hours |= {one: one * step for one in range(end, end + number)}
                end += number
                ingest(table, end=end, step=step)
            elif kind == "compact":
                compact(table, max_hours=number)
            elif kind == "expire" and end:
                table.expire(0, hour(number))
                hours = {one: at for one, at in hours.items() if at // HOUR >= number}
            elif kind == "restart":
                table = Table(Path(name))
                table.remove_uncommitted(0)
            assert stored(table) == [(offset, index) for offset in sorted(hours) for index in (0, 1)]
            assert sum(file.rows for file in table.live(0).invalid_files.values()) == len(hours)
