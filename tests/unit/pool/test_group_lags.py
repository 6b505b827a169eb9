"""Lags of groups: figures of listings, trends and warnings, in virtual time."""

from __future__ import annotations

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.broker.management.listings import ListedQueue
from osrdyne.pool.state.queues.backlog import PriorityBacklog
from osrdyne.pool.state.queues.lag import GROWING_LISTINGS, GroupLags, HoltTrend
from osrdyne.protocol.names import Key
from osrdyne.testing.clock import VirtualClock


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
