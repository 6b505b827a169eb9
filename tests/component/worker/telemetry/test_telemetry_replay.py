"""A replay stores a range of the log in a table of its own, however often it is requested."""

from datetime import UTC, datetime

import pytest
from stored_telemetry import START, events, ingest, messages, stored, write

from osrdyne.errors import StreamDataLostError
from osrdyne.telemetry.times import taken_from
from osrdyne_worker.pipelines.telemetry.ranges import next_range, store
from osrdyne_worker.pipelines.telemetry.replays import Bound, ReplayConflictError, ReplayError, plan_replay
from osrdyne_worker.pipelines.telemetry.table import Replay, Table

LOG = (5, 60)


def first_after(when: datetime) -> int:
    """A message each second from START on; the offset counts them."""
    is_after = taken_from(when)
    return next((one.offset for one in messages(*LOG) if is_after(one)), LOG[1])


def time(offset: float) -> str:
    return datetime.fromtimestamp(START / 1000 + offset, UTC).isoformat()


def replay(table: Table, begin: Bound, end: Bound, *, log: tuple[int, int] = LOG, loss: bool = True) -> bool:
    """One request; whether the replay has reached its end."""
    last = table.last_commit(0)
    plan = plan_replay(last, begin, end, bounds=log, first_after=first_after)
    wanted = next_range(last, log, stream="s", max_offsets=8, fail_on_data_loss=loss, replay=plan)
    if wanted.is_commit:
        store(table, wanted, write(table, wanted), partition=0)
    return wanted.stop == wanted.end


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        pytest.param(10, 30, (10, 30), id="offsets"),
        pytest.param(time(10), time(30), (10, 30), id="times"),
        pytest.param(time(9.5), time(29.5), (10, 30), id="times between messages"),
        pytest.param(None, 20, (5, 20), id="from the first message"),
        pytest.param(40, None, (40, 60), id="to the end"),
        pytest.param(40, 1_000, (40, 60), id="beyond the end"),
        pytest.param(time(-5), time(1_000), (5, 60), id="times beyond the log"),
        pytest.param(10, 10, (10, 10), id="nothing"),
    ],
)
@pytest.mark.proves("telemetry-tables/replay-interrupted-requested-twice")
def test_range_is_stored_once_however_often_it_is_requested(table, begin, end, expected):
    while not replay(table, begin, end):
        pass
    last = table.last_commit(0)
    assert replay(table, begin, end)
    assert stored(table) == events(*expected)
    assert table.last_commit(0) == last != None  # noqa: E711


def test_table_of_a_replay_ends_where_the_replay_ends(table):
    replay(table, 10, 20)
    table.expire(0, datetime(2020, 1, 1, tzinfo=UTC))
    for _ in range(3):
        ingest(table, end=60)
    assert stored(table) == events(10, 20)
    assert table.last_commit(0).replay == Replay(10, 20, 10, 20)  # type: ignore[union-attr]


def test_expired_hours_of_a_replay_leave_its_range(table):
    replay(table, 10, 20)
    assert table.expire(0, datetime(2100, 1, 1, tzinfo=UTC)) is not None
    assert replay(table, 10, 20)
    assert stored(table) == events(18, 20)


@pytest.mark.proves("telemetry-tables/replay-names-table-holds")
def test_replay_needs_a_table_of_its_own(table, tmp_path):
    ingest(table, end=20)
    with pytest.raises(ReplayConflictError, match=r"/ingest .* 20"):
        replay(table, 10, 30)
    other = Table(tmp_path / "other")
    replay(other, 10, None)
    with pytest.raises(ReplayConflictError, match=r"from 10 to .* from 10 to 30"):
        replay(other, 10, 30)


@pytest.mark.parametrize(
    ("begin", "end", "problem"),
    [("yesterday", None, "'yesterday'"), (61, None, "offset 61.* 60"), (30, 20, "offset 30.* 20")],
)
def test_invalid_range_is_refused(table, begin, end, problem):
    with pytest.raises(ReplayError, match=problem):
        replay(table, begin, end)


def test_lost_offsets_of_a_replay_are_an_error_unless_that_is_allowed(table, tmp_path):
    with pytest.raises(StreamDataLostError, match="0 to 2"):
        replay(table, 0, 3)
    assert replay(table, 0, 3, loss=False)
    assert stored(table) == []
    with pytest.raises(StreamDataLostError, match="3 to 4"):
        replay(Table(tmp_path / "other"), 3, 10)
