"""The rate of a worker in virtual time: what it serves, what waits in the queue, since when, and in which order."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_worker_processor import QUEUE, REPLIES, RETRIES, Bench, until

from osrdyne.aio.clock import now_ms
from osrdyne.aio.signals import WatchCell
from osrdyne.amqp import Message
from osrdyne.broker.management.listings import ListedQueue
from osrdyne.pool.state.queues.backlog import PriorityBacklog
from osrdyne.pool.state.queues.lag import GroupLags
from osrdyne.protocol.names import Key, QueueName
from osrdyne.protocol.rates import EventRate
from osrdyne.testing.clock import VirtualClock
from osrdyne_worker import App, Call
from osrdyne_worker.requests.retries import Retries
from osrdyne_worker.requests.scheduling.rates import BURST, MAX_DEBT, EventBudget, count_events
from osrdyne_worker.runtime.settings import RuntimeSettings

HIGH = QueueName("high_Pri0")
STORE_S1 = EventRate(720, 1024)


class RatedBench(Bench):
    """A worker with one request at a time that consumes its queue; handlers return at once."""

    def __init__(self, *arguments: Any) -> None:
        self.served: list[tuple[float, str]] = []
        super().__init__(*arguments)
        self.processor._retries = Retries(RETRIES)
        self.tasks: list[asyncio.Task[None]] = []
        self.sent = 0

    def make_app(self) -> App:
        app = App()

        @app.default_handler
        async def serve(call: Call) -> None:
            self.served.append((self.clock.monotonic() - self.begun, str(call.correlation_id)))

        return app

    async def start(self, group: asyncio.TaskGroup) -> None:
        await self.open()
        await self.channel.cancel(self.consumer)
        self.broker.declare_queue(HIGH, {})
        queues = WatchCell[tuple[QueueName, ...]]((QueueName(QUEUE),))
        self.queues = queues
        for queue in (QueueName(QUEUE), HIGH):
            self.tasks.append(group.create_task(self.intake(queue, queues).run()))
        self.begun = self.clock.monotonic()
        self.processor.budget.use(STORE_S1)
        await self.clock.settle()

    async def send(self, events: int = 1, *, queue: str = QUEUE, name: str | None = None, **more: Any) -> None:
        body = json.dumps({"events": [{"v": 1}] * events}).encode()
        self.sent += 1
        message = Message(
            body=body, headers={"x-rpc-path": "/store"}, correlation_id=name or str(self.sent), reply_to=REPLIES, **more
        )
        await self.broker.publish(message, exchange="", routing_key=queue)

    @property
    def waiting(self) -> int:
        """Requests that are not served yet, wherever they wait."""
        return self.sent - len(self.served)

    @property
    def ready(self) -> int:
        return len(self.broker.look_up(QUEUE).ready)


@pytest.fixture
async def bench() -> AsyncIterator[RatedBench]:
    with ThreadPoolExecutor(2) as threads:
        async with asyncio.TaskGroup() as group:
            bench = RatedBench(group, threads, RuntimeSettings(stuck_grace=0.0))
            await bench.start(group)
            yield bench
            bench.processor.budget.use(None)
            await bench.clock.settle()
            for task in bench.tasks:
                task.cancel()
    assert bench.processor._slots.free == 1


class LagFigures:
    """The lag that the leader shows for the queue, from a listing at each call."""

    def __init__(self, bench: RatedBench) -> None:
        self.bench = bench
        self.backlog = PriorityBacklog(since=bench.clock.monotonic())
        self.lags = GroupLags(bench.clock, self.backlog)

    def note_sent(self) -> None:
        self.backlog.note(Key("k"), None, self.bench.clock.monotonic())

    def list(self) -> tuple[int, float]:
        ready = self.bench.ready
        listed = [ListedQueue(Key("k"), bound=True, ready=ready, messages=None, ready_by_level={None: ready})]
        self.backlog.take_listing(listed)
        self.lags.take_listing(listed)
        total = self.lags.pool()
        return total.messages, total.seconds or 0.0


async def offer(bench: RatedBench, lag: LagFigures, interval: Fraction, minutes: int, events: list[int]) -> None:
    """Send a message at each multiple of `interval` seconds, until just before the end of the last minute."""
    first, begun = bench.sent, bench.clock.monotonic()
    for number in range(int(60 * minutes / interval)):
        await bench.clock.advance(begun + float(number * interval) - bench.clock.monotonic())
        await bench.send(events[(first + number) % len(events)])
        lag.note_sent()
    await bench.clock.advance(begun + 60 * minutes - 0.001 - bench.clock.monotonic())


@pytest.mark.parametrize(
    ("a_minute", "events"), [(277, [2, 3]), (720, [1])], ids=["277 messages x 2.5 events", "720 messages x 1 event"]
)
async def test_load_at_or_below_the_rate_never_lags(bench: RatedBench, a_minute: int, events: list[int]) -> None:
    """One unit of the store takes 720 events a minute."""
    lag = LagFigures(bench)
    for minute in range(1, 6):
        await offer(bench, lag, Fraction(60, a_minute), 1, events)
        assert bench.sent == a_minute * minute
        assert (bench.waiting, lag.list()) in [(0, (0, 0.0)), (1, (0, 0.0))]
        await bench.clock.advance(0.001)


@pytest.mark.proves("quotas/clients-send-more-events")
async def test_load_above_the_rate_falls_behind_by_80_events_a_minute(bench: RatedBench) -> None:
    """200 messages with 4 events each, 111 % of 720 a minute."""
    lag = LagFigures(bench)
    for minute in range(1, 11):
        await offer(bench, lag, Fraction(60, 200), 1, [4])
        assert len(bench.served) == 180 * minute
        assert 4 * bench.waiting == 80 * minute
        # One of those that wait is in the worker already.
        messages, seconds = lag.list()
        assert messages == 20 * minute - 1
        assert 6 * minute - 0.4 < seconds < 6 * minute + 1
        await bench.clock.advance(0.001)
    assert lag.lags.pool().slope * 60 == pytest.approx(20)
    assert lag.lags.pool().drained_in is None


async def test_queue_of_a_peak_drains_at_the_rate_and_in_order(bench: RatedBench) -> None:
    """Six times the rate for a while, and five times as long until the queue is empty."""
    lag = LagFigures(bench)
    await offer(bench, lag, Fraction(60, 6 * 720), 1, [1])
    assert (len(bench.served), bench.waiting) == (720, 5 * 720)
    await bench.clock.advance(5 * 60.0 - 0.1)
    assert bench.waiting == 1
    await bench.clock.advance(0.1)
    assert [int(name) for _, name in bench.served] == list(range(1, 6 * 720 + 1))
    assert Counter(bench.statuses()) == {"ok": 6 * 720}


async def test_units_change_live_and_what_is_owed_is_paid_at_the_new_rate(bench: RatedBench) -> None:
    for _ in range(40):
        await bench.send(72)
    await bench.clock.advance(5.9)  # 72 events last for 6 seconds
    assert len(bench.served) == 1
    bench.processor.budget.use(EventRate(7200, 1024))
    await bench.clock.advance(0.01)
    assert len(bench.served) == 2
    await bench.clock.advance(5.98)
    assert len(bench.served) == 11
    bench.processor.budget.use(None)
    await bench.clock.settle()
    assert bench.waiting == 0


@pytest.mark.proves("quotas/clients-send-more-events")
async def test_deadline_and_cancel_of_a_request_that_waits_hold(bench: RatedBench) -> None:
    await bench.send(720, name="first")
    await bench.clock.settle()
    deadline = now_ms(bench.clock) + 100
    message = Message(
        body=b"x",
        headers={"x-rpc-path": "/store", "x-deadline": deadline},
        correlation_id="late",
        reply_to=REPLIES,
    )
    await bench.broker.publish(message, exchange="", routing_key=QUEUE)
    await bench.send(name="cancelled")
    await bench.send(name="last")
    await until(lambda: bench.statuses() == ["ok", "expired"])  # the timers of deadlines are those of the event loop
    bench.processor.cancel("cancelled", REPLIES)
    await bench.clock.settle()
    assert bench.statuses() == ["ok", "expired", "cancelled"]
    await bench.clock.advance(60.0)
    # Neither has taken anything from the budget: the last one begins at the moment that the first has paid for.
    assert [(round(at, 6), name) for at, name in bench.served] == [(0.0, "first"), (60.0, "last")]


async def test_higher_priority_is_served_first_when_the_budget_allows_it(bench: RatedBench) -> None:
    bench.queues.set((HIGH, QueueName(QUEUE)))
    await bench.clock.settle()
    await bench.send(72, name="first")
    await bench.clock.settle()
    await bench.send(72, name="low")
    await bench.clock.advance(1.0)
    await bench.send(72, name="high", queue=HIGH)
    await bench.clock.advance(20.0)
    assert [name for _, name in bench.served] == ["first", "high", "low"]


@pytest.mark.proves("quotas/one-request-more-events")
async def test_request_with_more_events_than_a_minute_serves_is_refused(bench: RatedBench) -> None:
    await bench.send(721)
    await bench.clock.settle()
    [reply] = bench.broker.look_up(REPLIES).ready
    assert bench.statuses() == ["error"]
    assert b"too_many_events" in reply.message.body
    assert b"Send fewer events" in reply.message.body


async def test_worker_that_stops_returns_what_waits(bench: RatedBench) -> None:
    await bench.send(720)
    await bench.send(1)
    await bench.clock.settle()
    bench.queues.set(())
    await bench.clock.settle()
    bench.processor.requeue()
    await bench.clock.settle()
    assert (bench.ready, bench.processor.in_flight, bench.statuses()) == (1, 0, ["ok"])


@pytest.mark.parametrize(
    ("body", "events"),
    [
        (b"", 1),
        (b"x" * 1024, 1),
        (b"x" * 1025, 2),
        (b"x" * 2_600, 3),
        (b"x" * 10**6, 32),
        (b'{"events": [1, "two", {"three": 3}]}', 3),
        (b'{"events": ["%s", 1]}' % (b"x" * 2_600), 4),
        (b'{"events": ["%s", 1]}' % (b"x" * 40_000), 33),
        (b'{"events": []}', 1),
        (b'{"events": {"a": 1}}', 1),
        (b'{"events": [1, 2', 1),
        (b'["events"]', 1),
        (b'{"events": ["\\ud800"]}', 1),
        (b'{"\\u0065vents": [1, 2, 3]}', 3),
        ('{"events": [1, 2, 3]}'.encode("utf-16"), 3),
        ('{"events": [1, 2, 3]}'.encode("utf-32-le"), 3),
        (b'{"events":' + b"[" * 100_000, 32),
    ],
)
def test_events_of_a_body_count_in_blocks(body: bytes, events: int) -> None:
    assert count_events(body, 1024) == events


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 720)), min_size=1, max_size=60),
    st.integers(1, 7200),
)
def test_no_span_of_time_serves_more_than_the_rate_and_a_burst(steps: list[tuple[float, int]], rate: int) -> None:
    clock = VirtualClock()
    budget, begun = EventBudget(clock, EventRate(rate, 1024)), []
    for pause, wanted in steps:
        events = min(wanted, rate)  # more are refused
        clock._now += pause + budget.wait()
        begun.append((clock.monotonic(), events))
        budget.take(events)
    for first, (start, _) in enumerate(begun):
        taken = 0
        for at, events in begun[first:]:
            # Before each request, without its own events: those are paid for afterwards.
            assert taken <= (at - start + BURST) * rate / 60 + 1e-3
            taken += events


def test_a_much_lower_rate_delays_the_next_request_by_a_minute_at_most() -> None:
    high, low = EventRate(100_000, 1024), EventRate(1, 1024)
    owing = EventBudget(VirtualClock(), high)
    owing.take(100_000)
    owing.use(low)
    assert owing.wait() <= MAX_DEBT
    counted_before = EventBudget(VirtualClock(), high)
    counted_before.use(low)
    counted_before.take(100_000)
    assert counted_before.wait() <= MAX_DEBT


@given(st.lists(st.integers(1, 720), min_size=2, max_size=60))
def test_a_worker_with_much_to_do_serves_exactly_the_rate(requests: list[int]) -> None:
    clock = VirtualClock()
    budget = EventBudget(clock, STORE_S1)
    for events in requests:
        clock._now += budget.wait()
        budget.take(events)
    clock._now += budget.wait()
    assert (clock.monotonic() - 1_000.0) * 12 == pytest.approx(sum(requests))
