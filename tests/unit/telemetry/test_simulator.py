"""Simulated devices: the same seed gives the same bytes, sizes are exact, messages are published at their times."""

import asyncio
import hashlib
import json
import math
import tracemalloc
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from typing import Any

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
from osrdyne.telemetry.simulator import MIN_EVENT_BYTES, MessageKind, SimulatedMessage, Simulation, simulate
from osrdyne.telemetry.simulator_run import RunSummary, SimulatorRun
from osrdyne.testing.clock import VirtualClock

START = 1_795_420_800_000
FAULTS = {"late": 0.1, "out_of_order": 0.1, "clock_skew": 30.0, "duplicates": 0.1, "invalid": 0.1, "oversized": 0.05}
RATES = {"messages_a_minute": Fraction(600), "events": Fraction(5, 2), "alarms_a_minute": Fraction(30)}
ALL_FAULTS = Simulation(devices=20, sites=3, start_ms=START, **RATES, **FAULTS)  # type: ignore[arg-type]

shares = st.floats(0, 1)
simulations = st.builds(
    Simulation,
    devices=st.integers(2, 12),
    sites=st.integers(1, 2),
    messages_a_minute=st.fractions(0, 300, max_denominator=7),
    events=st.fractions(1, 12, max_denominator=4),
    event_bytes=st.none() | st.integers(MIN_EVENT_BYTES, 5000),
    duration=st.fractions(0, 30, max_denominator=10),
    seed=st.integers(),
    start_ms=st.integers(0, START),
    alarms_a_minute=st.fractions(0, 60, max_denominator=3),
    late=shares,
    late_by=st.floats(0, 1e6),
    out_of_order=shares,
    clock_skew=st.floats(0, 1e4),
    duplicates=shares,
    invalid=shares,
    oversized=shares,
)


def events_of(message: SimulatedMessage) -> list[dict[str, Any]]:
    document = json.loads(message.body)
    events: list[dict[str, Any]] = document.get("events", [document])
    return events


def test_a_seed_gives_the_same_bytes_on_every_machine():
    found = hashlib.sha256()
    for one in simulate(ALL_FAULTS):
        fields = (one.at_us, one.key, one.message_id, sorted(one.headers), one.kind.value)
        found.update(repr(fields).encode() + one.body)
    assert found.hexdigest() == "c765bf5c2904471dbff26bdd0e33dd599e513bfd9446c252f2a2e726e055c04f"
    assert list(simulate(replace(ALL_FAULTS, seed=2))) != list(simulate(ALL_FAULTS))


@given(simulations)
def test_messages_come_in_time_and_as_often_as_the_rates_say(simulation):
    messages = list(simulate(simulation))
    assert messages == list(simulate(simulation))
    times = [one.at_us for one in messages]
    assert times == sorted(times)
    assert all(0 <= at < simulation.duration * 1_000_000 for at in times)
    sent = [one for one in messages if one.kind is not MessageKind.DUPLICATE]
    assert len({one.message_id for one in sent}) == len(sent)
    alarms = sum(one.is_alarm for one in sent)
    minutes = simulation.duration / 60
    assert 0 <= alarms - simulation.alarms_a_minute * minutes < 1
    count = len(sent) - alarms
    assert 0 <= count - simulation.messages_a_minute * minutes < 1
    assert sum(one.events for one in sent if not one.is_alarm) == int(count * simulation.events)


@given(simulations)
def test_sizes_are_exact_and_only_invalid_messages_are_not_json(simulation):
    originals = {}
    for one in simulate(simulation):
        if one.kind is MessageKind.DUPLICATE:
            assert replace(one, kind=originals[one.message_id].kind) == originals[one.message_id]
            continue
        originals[one.message_id] = one
        if one.kind is MessageKind.INVALID:
            with pytest.raises(ValueError, match=r"^"):
                json.loads(one.body)
            continue
        sizes = [len(json.dumps(event, separators=(",", ":"))) for event in events_of(one)]
        assert len(sizes) == one.events
        expected = [simulation.event_bytes or size for size in sizes]
        if one.kind is MessageKind.OVERSIZED:
            expected[0] = 33 * 1024
        assert sizes == expected


def test_memory_does_not_grow_with_the_duration():
    messages = simulate(replace(ALL_FAULTS, duration=Fraction(10**9), invalid=0.0, oversized=0.0))
    used = []
    tracemalloc.start()
    try:
        for _ in range(3):
            assert sum(1 for _ in islice(messages, 500)) == 500
            used.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert used[-1] - used[0] < 25_000


def test_what_cannot_be_is_refused():
    for wrong in ({"devices": 0}, {"sites": 51}, {"events": Fraction(1, 2)}, {"late": 1.1}, {"invalid": math.nan}):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))}"):
            Simulation(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^size"):
        Simulation(event_bytes=100)
    with pytest.raises(ValueError, match=r"^start"):
        Simulation(start_ms=10**15)


Running = asyncio.Task[RunSummary]
TWO_A_SECOND = Simulation(messages_a_minute=Fraction(120), duration=Fraction(10))


async def started(clock: VirtualClock, run: SimulatorRun, simulation: Simulation, seconds: float) -> Running:
    """The run, after this time."""
    running = asyncio.create_task(run.run(simulate(simulation)))
    await clock.advance(seconds)
    return running


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
async def test_messages_are_sent_at_their_times(clock, speed, interval):
    log = Log(clock)
    summary = await (await started(clock, SimulatorRun(log.publish, clock=clock, speed=speed), TWO_A_SECOND, 20))
    assert log.arrived == pytest.approx([1_000.0 + number * interval for number in range(20)])
    assert (summary.sent, summary.confirmed, summary.behind) == (20, 20, pytest.approx(0.0))
    assert summary.seconds == pytest.approx(19 * interval)


async def test_every_outcome_is_counted(clock):
    refusal = Reply(status=Status.QUOTA_EXCEEDED)
    answers: dict[int, Exception] = {
        0: QuotaExceededError("", reply=refusal),
        1: QuotaExceededError("", reply=refusal),
        2: RequestQueueFullError(""),
        3: RequestTimeoutError("", sent=True),
        4: ConnectionLostError(""),
    }
    run = SimulatorRun(Log(clock, delay=0.25, answers=answers).publish, clock=clock, speed=0)
    summary = await (await started(clock, run, replace(TWO_A_SECOND, alarms_a_minute=Fraction(6)), 1))
    found = summary.to_json()
    assert (found["sent"], found["confirmed"]) == (21, 16)
    assert summary.kinds[MessageKind.ALARM].confirmed + summary.kinds[MessageKind.TELEMETRY].confirmed == 16
    assert found["refused"] == {"quota-exceeded": 2, "not accepted by RabbitMQ": 1}
    assert found["unanswered"] == {"timeout": 1, "connection lost": 1}
    assert found["kinds"]["telemetry"]["answered_p95"] == pytest.approx(0.25)


async def test_stop_waits_for_answers_and_a_missing_pool_ends_the_run(clock):
    run = SimulatorRun(Log(clock, delay=5.0).publish, clock=clock)
    running = await started(clock, run, TWO_A_SECOND, 1.2)
    run.stop()
    await clock.advance(1)
    assert not running.done()
    await clock.advance(10)
    summary = await running
    assert (summary.sent, summary.confirmed, summary.interrupted) == (3, 3, True)
    log = Log(clock, delay=0.1, answers={number: PoolNotFoundError("There is no pool.") for number in range(20)})
    running = await started(clock, SimulatorRun(log.publish, clock=clock, speed=0, in_flight=5), TWO_A_SECOND, 1)
    with pytest.raises(PoolNotFoundError):
        await running
    assert len(log.arrived) == 5
