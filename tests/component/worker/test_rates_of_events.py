"""The rate of a worker in virtual time: what it serves, what waits in the queue, since when, and in which order."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_bench import QUEUE, REPLIES, Bench, bench_fixture, until

from osrdyne.aio.clock import now_ms
from osrdyne.aio.signals import WatchCell
from osrdyne.protocol.names import QueueName
from osrdyne.protocol.rates import EventRate
from osrdyne.testing.clock import VirtualClock
from osrdyne_worker import App, Call
from osrdyne_worker.requests.scheduling.rates import BURST, MAX_DEBT, EventBudget, count_events

HIGH = QueueName("high_Pri0")
STORE_S1 = EventRate(720, 1024)


class RatedBench(Bench):
    """A worker with one request at a time that consumes its queue; handlers return at once."""

    def __init__(self, *arguments: Any) -> None:
        self.served: list[tuple[float, str]] = []
        super().__init__(*arguments)
        self.sent = 0

    def make_app(self) -> App:
        app = App()

        @app.default_handler
        async def serve(call: Call) -> None:
            self.served.append((self.clock.monotonic() - self.begun, str(call.correlation_id)))

        return app

    async def open(self) -> None:
        await super().open()
        await self.channel.cancel(self.consumer)
        self.broker.declare_queue(HIGH, {})
        self.queues = WatchCell[tuple[QueueName, ...]]((QueueName(QUEUE),))
        for queue in (QueueName(QUEUE), HIGH):
            self.consume(queue, self.queues)
        self.begun = self.clock.monotonic()
        self.processor.budget.use(STORE_S1)
        await self.clock.settle()

    async def finish(self) -> None:
        self.processor.budget.use(None)
        await self.clock.settle()
        await self.stop_intakes()
        await super().finish()

    async def send(self, events: int = 1, *, name: str | None = None, **more: Any) -> None:
        body = json.dumps({"events": [{"v": 1}] * events}).encode()
        self.sent += 1
        await self.publish("/store", body=body, correlation_id=name or str(self.sent), **more)

    @property
    def waiting(self) -> int:
        """Requests that are not served yet, wherever they wait."""
        return self.sent - len(self.served)

    async def offer(self, a_minute: int, events: list[int]) -> None:
        """Send messages evenly for a minute, until just before its end."""
        first, begun = self.sent, self.clock.monotonic()
        for number in range(a_minute):
            await self.clock.advance(begun + 60 * number / a_minute - self.clock.monotonic())
            await self.send(events[(first + number) % len(events)])
        await self.clock.advance(begun + 60 - 0.001 - self.clock.monotonic())


bench = bench_fixture(RatedBench, stuck_grace=0.0)


@pytest.mark.parametrize(
    ("a_minute", "events", "behind"),
    [(277, [2, 3], 0), (720, [1], 0), (200, [4], 20)],
    ids=["277 messages x 2.5 events", "720 messages x 1 event", "200 messages x 4 events"],
)
@pytest.mark.proves("quotas/clients-send-more-events")
async def test_load_above_the_rate_falls_behind_by_what_is_too_much(bench, a_minute, events, behind):
    """One unit of the store takes 720 events a minute."""
    for minute in range(1, 6):
        await bench.offer(a_minute, events)
        assert bench.waiting - behind * minute in ({0} if behind else {0, 1})
        await bench.clock.advance(0.001)


async def test_queue_of_a_peak_drains_at_the_rate_and_in_order(bench):
    """Six times the rate for a while, and five times as long until the queue is empty."""
    await bench.offer(6 * 720, [1])
    assert (len(bench.served), bench.waiting) == (720, 5 * 720)
    await bench.clock.advance(5 * 60.0 - 0.1)
    assert bench.waiting == 1
    await bench.clock.advance(0.1)
    assert [int(name) for _, name in bench.served] == list(range(1, 6 * 720 + 1))
    assert Counter(bench.statuses()) == {"ok": 6 * 720}


async def test_units_change_live_and_what_is_owed_is_paid_at_the_new_rate(bench):
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
async def test_deadline_and_cancel_of_a_request_that_waits_hold(bench):
    await bench.send(720, name="first")
    await bench.clock.settle()
    await bench.send(name="late", **{"x-deadline": now_ms(bench.clock) + 100})
    await bench.send(name="cancelled")
    await bench.send(name="last")
    await until(lambda: bench.statuses() == ["ok", "expired"])  # the timers of deadlines are those of the event loop
    bench.processor.cancel("cancelled", REPLIES)
    await bench.clock.settle()
    assert bench.statuses() == ["ok", "expired", "cancelled"]
    await bench.clock.advance(60.0)
    # Neither has taken anything from the budget: the last one begins at the moment that the first has paid for.
    assert [(round(at, 6), name) for at, name in bench.served] == [(0.0, "first"), (60.0, "last")]


async def test_higher_priority_is_served_first_when_the_budget_allows_it(bench):
    bench.queues.set((HIGH, QueueName(QUEUE)))
    for name in ("first", "low"):
        await bench.clock.settle()
        await bench.send(72, name=name)
    await bench.clock.advance(1.0)
    await bench.send(72, name="high", queue=HIGH)
    await bench.clock.advance(20.0)
    assert [name for _, name in bench.served] == ["first", "high", "low"]


@pytest.mark.proves("quotas/one-request-more-events")
async def test_request_with_more_events_than_a_minute_serves_is_refused(bench):
    await bench.send(721)
    await bench.clock.settle()
    assert bench.statuses() == ["error"]
    assert b"too_many_events" in bench.replies()[0].body


async def test_worker_that_stops_returns_what_waits(bench):
    await bench.send(720)
    await bench.send(1)
    await bench.clock.settle()
    bench.queues.set(())
    await bench.clock.settle()
    bench.processor.requeue()
    await bench.clock.settle()
    assert (bench.unfinished(), bench.processor.in_flight, bench.statuses()) == (1, 0, ["ok"])


THREE = '{"events": [1, "two", {"three": 3}]}'
UNREADABLE = [b'{"events": {"a": 1}}', b'{"events": [1, 2', b'["events"]']
BODIES = {
    1: [b"", b"x" * 1024, b'{"events": []}', b'{"events": ["\\ud800"]}', *UNREADABLE],
    2: [b"x" * 1025],
    3: [b"x" * 2_600, b'{"\\u0065vents": [1, 2, 3]}', *map(THREE.encode, ("utf-8", "utf-16", "utf-32-le"))],
    4: [b'{"events": ["%s", 1]}' % (b"x" * 2_600)],
    32: [b"x" * 10**6, b'{"events":' + b"[" * 100_000],
    33: [b'{"events": ["%s", 1]}' % (b"x" * 40_000)],
}


@pytest.mark.parametrize(("body", "events"), [(body, events) for events in BODIES for body in BODIES[events]])
def test_events_of_a_body_count_in_blocks(body, events):
    assert count_events(body, 1024) == events


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 720)), min_size=1, max_size=60), st.integers(1, 7200))
def test_no_span_of_time_serves_more_than_the_rate_and_a_burst(steps, rate):
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


@pytest.mark.parametrize("first", ["take", "use"])
def test_a_much_lower_rate_delays_the_next_request_by_a_minute_at_most(first):
    budget = EventBudget(VirtualClock(), EventRate(100_000, 1024))
    steps = {"take": lambda: budget.take(100_000), "use": lambda: budget.use(EventRate(1, 1024))}
    steps.pop(first)()
    for step in steps.values():
        step()
    assert budget.wait() <= MAX_DEBT
