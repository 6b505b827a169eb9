"""How many requests wait in each class and since when, and the lags, trends and warnings that follow."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
import structlog

from osrdyne.broker.management.listings import ListedQueue
from osrdyne.pool.state.queues.backlog import MAX_MARKS, ArrivalLog, PriorityBacklog, Waiting
from osrdyne.pool.state.queues.lag import GROWING_LISTINGS, GroupLags, LineTrend
from osrdyne.protocol.names import Key
from osrdyne.testing.clock import VirtualClock

A, B = Key("a"), Key("b")
RECORDED = json.loads((Path(__file__).parent / "recorded_backlogs.json").read_text())
"""Queues of RabbitMQ 3.10 that were listed every 5 s: time, the listed number, and the true one (decision 0139)."""


def listed(key: Key, **ready: int) -> ListedQueue:
    """`default`, or `p` and a priority."""
    by_class = {None if name == "default" else int(name[1:]): count for name, count in ready.items()}
    return ListedQueue(key, bound=True, ready=sum(ready.values()), messages=None, ready_by_level=by_class)


def test_oldest_of_those_that_wait_is_that_many_arrivals_back_or_from_before_the_log():
    log = ArrivalLog()
    for at in range(0, 100, 10):
        log.note(float(at))
    assert [log.oldest_at(waiting) for waiting in (11, 10, 3, 1)] == [None, 0.0, 70.0, 90.0]


@pytest.mark.parametrize("since", [3.0, None], ids=["the age of the term", "arrivals are not noted"])
def test_what_waited_before_the_term_is_as_old_as_the_term(since):
    backlog = PriorityBacklog(since=since)
    if since is not None:
        backlog.note(A, None, 10.0)
    backlog.take_listing([listed(A, default=5)])
    assert backlog.waiting() == {None: Waiting(5, since)}


def test_reported_age_is_never_too_low_with_any_number_of_marks():
    log = ArrivalLog()
    for number in range(20 * MAX_MARKS):
        log.note(float(number))
    found = [log.oldest_at(waiting) for waiting in range(20 * MAX_MARKS, 0, -7)]
    true = [20 * MAX_MARKS - waiting for waiting in range(20 * MAX_MARKS, 0, -7)]
    assert all(one is not None and one <= at for one, at in zip(found, true, strict=True))
    assert len(log._marks) <= MAX_MARKS


def test_classes_are_summed_over_groups_and_the_oldest_of_all_counts():
    backlog = PriorityBacklog(since=0.0)
    backlog.note(A, 0, 10.0)
    backlog.note(B, 0, 5.0)
    backlog.note(B, 0, 20.0)
    backlog.take_listing([listed(A, p0=1, default=0), listed(B, p0=1, default=0)])
    assert backlog.waiting() == {0: Waiting(2, 10.0), None: Waiting(0, None)}
    of_groups = [backlog.of_group(key) for key in (A, B, Key("c"))]
    assert of_groups == [*({0: Waiting(1, at), None: Waiting(0, None)} for at in (10.0, 20.0)), {}]


def test_arrivals_that_are_over_are_forgotten_but_not_those_of_a_group_that_was_not_listed_yet():
    backlog = PriorityBacklog(since=0.0)
    for at in range(10, 60):
        backlog.note(A, None, float(at))
    backlog.take_listing([])
    backlog.take_listing([listed(A, default=50)])
    assert backlog.waiting() == {None: Waiting(50, 10.0)}
    backlog.take_listing([listed(A, default=0)])
    assert len(backlog._arrivals[A, None]._marks) == 1
    backlog.take_listing([])
    assert not backlog._arrivals


class World:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.backlog = PriorityBacklog(since=self.clock.monotonic())
        self.lags = GroupLags(self.clock, self.backlog)

    async def listing(self, **waiting: int) -> None:
        """A listing, a minute after the one before."""
        await self.clock.advance(60.0)
        found = [listed(Key(key), default=ready) for key, ready in waiting.items()]
        self.backlog.take_listing(found)
        self.lags.take_listing(found)


async def test_lag_has_the_figures_of_the_latest_listing_whose_time_it_names():
    world = World()
    assert world.lags.current().as_of is None
    world.backlog.note(Key("a"), None, world.clock.monotonic() + 30.0)
    await world.listing(a=1, b=3, c=0)
    listed_at = world.clock.time()
    await world.clock.advance(50.0)
    lags = world.lags.current()
    found = [(one.key, one.messages, one.seconds) for one in lags.groups]
    assert (found, lags.as_of) == ([("b", 3, 60.0), ("a", 1, 30.0)], listed_at)  # b: from before the term
    total = lags.pool
    assert total is not None
    assert (total.messages, total.seconds, total.drained_in) == (4, 60.0, None)
    await world.listing(a=0)
    ended = world.lags.current()
    assert (ended.groups, ended.pool and ended.pool.drained_in) == ([], 0.0)


async def test_queue_that_falls_has_a_forecast_and_one_that_grows_has_none():
    world = World()
    for number in range(10):
        await world.listing(falls=1_000 - 80 * number, grows=80 * number + 1)
    lags = {lag.key: lag for lag in world.lags.current().groups}
    assert lags[Key("falls")].slope == pytest.approx(-80 / 60)
    assert lags[Key("falls")].drained_in == pytest.approx(280 / 80 * 60)
    assert (lags[Key("grows")].slope, lags[Key("grows")].drained_in) == (pytest.approx(80 / 60), None)


async def test_lag_that_only_grows_is_logged_once():
    world = World()
    with structlog.testing.capture_logs() as logs:
        for number in range(GROWING_LISTINGS + 3):
            await world.listing(a=number + 1, steady=5)
    warned = [log.get("key") for log in logs if log["event"] == "lag only grows"]
    assert warned == ["a", None]  # the group, and the pool


def trends(name: str, step: int) -> Iterator[tuple[float, int, float]]:
    """Time, backlog and change a minute of listings every 5 * `step` seconds of a recorded backlog, for each possible
    first listing; without the first listing of each backlog."""
    points = [(at, listed) for at, listed, _ in RECORDED[name]]
    for first in range(step):
        trend: LineTrend | None = None
        for at, listed in points[first::step]:
            if not listed:
                trend = None
            elif trend is None:
                trend = LineTrend(listed, at)
            else:
                trend.add(listed, at)
                assert trend.slope is not None
                yield at, listed, 60 * trend.slope


@pytest.mark.parametrize("step", [6, 12])
@pytest.mark.parametrize(
    ("name", "since", "until", "true", "scale"),
    [
        pytest.param("graph", 10, 180, 252, 252, id="the graph rises"),
        pytest.param("graph", 250, 610, -108, 108, id="the graph falls"),
        pytest.param("falls", 200, 610, None, 240, id="falls with noise"),
        pytest.param("grows", 200, 610, None, 180, id="grows with noise"),
        pytest.param("steady", 200, 610, 0, 120, id="only noise"),
    ],
)
def test_recorded_backlog_has_its_true_trend(name, since, until, true, scale, step):
    """Within 10 % of `scale`: of the trend itself, or of the arrivals if they are random. All are for a minute; `true`
    None: from the first to the last number."""
    within = [(at, number) for at, _, number in RECORDED[name] if since <= at <= until]
    if true is None:
        (begin, first), (end, last) = within[0], within[-1]
        true = 60 * (last - first) / (end - begin)
    errors = [abs(found - true) / scale for at, _, found in trends(name, step) if since <= at <= until]
    assert median(errors) < 0.1


def test_recorded_burst_has_its_true_trend_as_soon_as_it_falls_between_two_listings():
    before, checked = 0, 0
    for at, listed, found in trends("burst", 12):
        if any(70 < at - begin < 95 for begin in (30, 180, 330, 480)) and before > listed:
            assert found == pytest.approx(-60, rel=0.1)
            checked += 1
        before = listed
    assert checked > 4
