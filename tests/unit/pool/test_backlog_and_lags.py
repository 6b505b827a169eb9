"""How many requests wait in each class and since when, and the lags, trends and warnings that follow."""

from __future__ import annotations

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.broker.management.listings import ListedQueue
from osrdyne.pool.state.queues.backlog import MAX_MARKS, ArrivalLog, PriorityBacklog, Waiting
from osrdyne.pool.state.queues.lag import GROWING_LISTINGS, GroupLags, HoltTrend
from osrdyne.protocol.names import Key
from osrdyne.testing.clock import VirtualClock

A, B = Key("a"), Key("b")


def listed(key: Key, **ready: int) -> ListedQueue:
    """`default`, or `p` and a priority."""
    by_class = {None if name == "default" else int(name[1:]): count for name, count in ready.items()}
    return ListedQueue(key, bound=True, ready=sum(ready.values()), messages=None, ready_by_level=by_class)


def test_oldest_of_those_that_wait_is_that_many_arrivals_back_or_from_before_the_log() -> None:
    log = ArrivalLog()
    for at in range(0, 100, 10):
        log.note(float(at))
    assert [log.oldest_at(waiting) for waiting in (11, 10, 3, 1)] == [None, 0.0, 70.0, 90.0]


@pytest.mark.parametrize("since", [3.0, None], ids=["the age of the term", "arrivals are not noted"])
def test_what_waited_before_the_term_is_as_old_as_the_term(since: float | None) -> None:
    backlog = PriorityBacklog(since=since)
    if since is not None:
        backlog.note(A, None, 10.0)
    backlog.take_listing([listed(A, default=5)])
    assert backlog.waiting() == {None: Waiting(5, since)}


def test_reported_age_is_never_too_low_with_any_number_of_marks() -> None:
    log = ArrivalLog()
    for number in range(20 * MAX_MARKS):
        log.note(float(number))
    found = [log.oldest_at(waiting) for waiting in range(20 * MAX_MARKS, 0, -7)]
    true = [20 * MAX_MARKS - waiting for waiting in range(20 * MAX_MARKS, 0, -7)]
    assert all(one is not None and one <= at for one, at in zip(found, true, strict=True))
    assert len(log._marks) <= MAX_MARKS


def test_classes_are_summed_over_groups_and_the_oldest_of_all_counts() -> None:
    backlog = PriorityBacklog(since=0.0)
    backlog.note(A, 0, 10.0)
    backlog.note(B, 0, 5.0)
    backlog.note(B, 0, 20.0)
    backlog.take_listing([listed(A, p0=1, default=0), listed(B, p0=1, default=0)])
    assert backlog.waiting() == {0: Waiting(2, 10.0), None: Waiting(0, None)}
    of_groups = [backlog.of_group(key) for key in (A, B, Key("c"))]
    assert of_groups == [*({0: Waiting(1, at), None: Waiting(0, None)} for at in (10.0, 20.0)), {}]


def test_arrivals_that_are_over_are_forgotten() -> None:
    backlog = PriorityBacklog(since=0.0)
    for at in range(50):
        backlog.note(A, None, float(at))
    backlog.take_listing([listed(A, default=0)])
    assert len(backlog._arrivals[A, None]._marks) == 1


def test_group_that_was_not_listed_yet_is_not_forgotten() -> None:
    backlog = PriorityBacklog(since=0.0)
    backlog.note(A, None, 10.0)
    backlog.take_listing([])
    backlog.take_listing([listed(A, default=1)])
    assert backlog.waiting() == {None: Waiting(1, 10.0)}
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
        listed = [
            ListedQueue(Key(key), bound=True, ready=ready, messages=None, ready_by_level={None: ready})
            for key, ready in waiting.items()
        ]
        self.backlog.take_listing(listed)
        self.lags.take_listing(listed)


async def test_lag_has_the_figures_of_the_latest_listing() -> None:
    world = World()
    world.backlog.note(Key("a"), None, world.clock.monotonic() + 30.0)
    await world.listing(a=1, b=3, c=0)
    [first, second] = world.lags.groups()
    assert (first.key, first.messages, first.seconds) == ("b", 3, 60.0)  # from before the term
    assert (second.key, second.messages, second.seconds) == ("a", 1, 30.0)
    total = world.lags.pool()
    assert (total.messages, total.seconds, total.drained_in) == (4, 60.0, None)
    await world.listing(a=0)
    assert (world.lags.groups(), world.lags.pool().drained_in) == ([], 0.0)


async def test_queue_that_falls_has_a_forecast_and_one_that_grows_has_none() -> None:
    world = World()
    for number in range(10):
        await world.listing(falls=1_000 - 80 * number, grows=80 * number + 1)
    lags = {lag.key: lag for lag in world.lags.groups()}
    assert lags[Key("falls")].slope * 60 == pytest.approx(-80)
    assert lags[Key("falls")].drained_in == pytest.approx(280 / 80 * 60)
    assert (round(lags[Key("grows")].slope * 60), lags[Key("grows")].drained_in) == (80, None)


async def test_lag_that_only_grows_is_logged_once() -> None:
    world = World()
    with structlog.testing.capture_logs() as logs:
        for number in range(GROWING_LISTINGS + 3):
            await world.listing(a=number + 1, steady=5)
    warned = [log.get("key") for log in logs if log["event"] == "lag only grows"]
    assert warned == ["a", None]  # the group, and the pool


@given(st.floats(-50, 50), st.integers(0, 10_000), st.integers(2, 20))
def test_a_straight_line_is_its_own_trend(slope: float, start: int, values: int) -> None:
    trend = HoltTrend(start, 0.0)
    for number in range(1, values):
        trend.add(start + slope * number, float(number))
    assert trend.slope == pytest.approx(slope, abs=1e-6)
