"""Simulated messages are published at their times, and what becomes of each is counted."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.client.errors import (
    ConnectionLostError,
    PoolNotFoundError,
    QuotaExceededError,
    RequestQueueFullError,
    RequestTimeoutError,
)
from osrdyne.client.reply import Reply
from osrdyne.protocol.statuses import Status
from osrdyne.telemetry.simulator import MessageKind, SimulatedMessage, Simulation, simulate
from osrdyne.telemetry.simulator_run import SimulatorRun, Times
from osrdyne.testing.clock import VirtualClock

TWO_A_SECOND = Simulation(messages_a_minute=Fraction(120), duration=Fraction(10))


class Log:
    """Takes messages, after `delay` seconds each; `answers` are errors by the number of the message."""

    def __init__(self, clock: VirtualClock, *, delay: float = 0.0, answers: dict[int, Exception] | None = None) -> None:
        self._clock = clock
        self._delay = delay
        self._answers = answers or {}
        self.arrived: list[float] = []
        self.most = self._now = 0

    async def publish(self, message: SimulatedMessage) -> None:
        self.arrived.append(self._clock.monotonic())
        number = len(self.arrived) - 1
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            await self._clock.sleep(self._delay)
            if number in self._answers:
                raise self._answers[number]
        finally:
            self._now -= 1


@pytest.mark.parametrize(("speed", "interval"), [(1.0, 0.5), (10.0, 0.05), (0.0, 0.0)])
async def test_messages_are_sent_at_their_times(clock: VirtualClock, speed: float, interval: float) -> None:
    log = Log(clock)
    run = SimulatorRun(log.publish, clock=clock, speed=speed)
    running = asyncio.create_task(run.run(simulate(TWO_A_SECOND)))
    await clock.advance(20)
    summary = await running
    assert log.arrived == pytest.approx([1_000.0 + number * interval for number in range(20)])
    assert (summary.sent, summary.confirmed, summary.behind) == (20, 20, pytest.approx(0.0))
    assert summary.seconds == pytest.approx(19 * interval)


async def test_messages_wait_while_too_many_are_in_flight(clock: VirtualClock) -> None:
    log = Log(clock, delay=2.0)
    run = SimulatorRun(log.publish, clock=clock, in_flight=2)
    running = asyncio.create_task(run.run(simulate(TWO_A_SECOND)))
    await clock.advance(60)
    summary = await running
    # Two messages in two seconds: the last two of 20 are sent after 18 s, and were due after 9.
    assert (log.most, summary.sent, summary.seconds) == (2, 20, pytest.approx(20.5))
    assert summary.behind == pytest.approx(9.0)


async def test_every_outcome_is_counted(clock: VirtualClock) -> None:
    refusal = Reply(status=Status.QUOTA_EXCEEDED)
    answers: dict[int, Exception] = {
        0: QuotaExceededError("", reply=refusal),
        1: QuotaExceededError("", reply=refusal),
        2: RequestQueueFullError(""),
        3: RequestTimeoutError("", sent=True),
        4: ConnectionLostError(""),
    }
    run = SimulatorRun(Log(clock, delay=0.25, answers=answers).publish, clock=clock, speed=0)
    running = asyncio.create_task(run.run(simulate(replace(TWO_A_SECOND, alarms_a_minute=Fraction(6)))))
    await clock.advance(1)
    summary = await running
    found = summary.to_json()
    assert (found["sent"], found["confirmed"]) == (21, 16)
    assert summary.kinds[MessageKind.ALARM].confirmed + summary.kinds[MessageKind.TELEMETRY].confirmed == 16
    assert found["refused"] == {"quota-exceeded": 2, "not accepted by RabbitMQ": 1}
    assert found["unanswered"] == {"timeout": 1, "connection lost": 1}
    assert found["kinds"]["telemetry"]["answered_p95"] == pytest.approx(0.25)


async def test_stop_sends_nothing_more_and_waits_for_answers(clock: VirtualClock) -> None:
    log = Log(clock, delay=5.0)
    run = SimulatorRun(log.publish, clock=clock)
    running = asyncio.create_task(run.run(simulate(TWO_A_SECOND)))
    await clock.advance(1.2)
    run.stop()
    await clock.advance(1)
    assert not running.done()
    await clock.advance(10)
    summary = await running
    assert (summary.sent, summary.confirmed, summary.interrupted) == (3, 3, True)


async def test_a_missing_pool_ends_the_run(clock: VirtualClock) -> None:
    log = Log(clock, delay=0.1, answers={number: PoolNotFoundError("There is no pool.") for number in range(20)})
    run = SimulatorRun(log.publish, clock=clock, speed=0, in_flight=5)
    running = asyncio.create_task(run.run(simulate(TWO_A_SECOND)))
    await clock.advance(1)
    with pytest.raises(PoolNotFoundError):
        await running
    assert len(log.arrived) == 5


@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=50), st.floats(0.01, 1))
def test_percentiles_are_at_most_two_percent_too_high(durations: list[float], share: float) -> None:
    times = Times()
    for one in durations:
        times.add(one)
    exact = sorted(durations)[max(0, math.ceil(share * len(durations)) - 1)]
    found = times.percentile(share)
    assert found is not None
    assert exact * 0.999999 <= found <= exact * 1.020001
