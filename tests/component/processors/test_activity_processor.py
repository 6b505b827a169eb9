"""The activity processor: reports count as use of a group once in an interval and never create a group."""

from unittest.mock import AsyncMock, Mock

import pytest

from osrdyne.amqp import Delivery, Message
from osrdyne.config.models import LifecycleSettings
from osrdyne.metrics import Metrics
from osrdyne.pool.state.groups.tracker import PoolStateTracker
from osrdyne.pool.state.groups.transitions import Delays, GroupStatus
from osrdyne.pool.state.observed import QueueStatuses
from osrdyne.pool.state.workers.worker_reports import WorkerRegistry
from osrdyne.processors.activity import ActivityProcessor, ProcessReports
from osrdyne.processors.forgeries import Forgeries
from osrdyne.protocol.activity import EVENT_HEADER, ActivityReport, Event
from osrdyne.protocol.names import Key
from osrdyne.protocol.pooled import PROCESS_KEY
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.context import make_context

A = Key("a")
INTERVAL = 10.0
UNBIND = 100.0


class Setting:
    def __init__(self, *, processes: ProcessReports | None = None) -> None:
        self.clock = VirtualClock(monotonic=0.0)
        self.tracker = PoolStateTracker(term=1, delays=Delays(UNBIND, 50.0), clock=self.clock)
        self.queue_status = QueueStatuses()
        self.worker_reports = WorkerRegistry(self.clock)
        self.metrics = Metrics()
        lifecycle = LifecycleSettings(extra_lifetime=INTERVAL)
        context = make_context(pool="pool", clock=self.clock, metrics=self.metrics, lifecycle=lifecycle)
        self.processor = ActivityProcessor(
            context,
            tracker=self.tracker,
            queue_status=self.queue_status,
            worker_reports=self.worker_reports,
            forgeries=Forgeries(context),
            on_report=AsyncMock(),
            on_retried=lambda *_: None,
            circuits=Mock(),
            crashes=Mock(),
            processes=processes,
        )

    def process(self, message: Message, key: str = A) -> None:
        channel = FakeChannel(FakeBroker(self.clock))
        self.processor.process(
            Delivery(channel, 1, "pool-activity-xchg", key, False, message.body, message.properties())
        )

    def report(self, event: Event, key: str = A, **details: object) -> None:
        report = ActivityReport(key, event, "w", details)
        self.process(Message(body=report.wire_body(), headers=report.wire_headers()), key)

    def until(self) -> float:
        record = self.tracker.record(A)
        assert record is not None
        return record.active_until


@pytest.fixture
def setting():
    return Setting()


def test_report_without_a_worker_id_counts_as_use_and_names_no_worker(setting):
    setting.tracker.require_worker_group(A)
    setting.process(Message(headers={EVENT_HEADER: bytearray(b"request-received")}))
    assert (setting.until(), setting.worker_reports.all()) == (UNBIND + INTERVAL, [])


@pytest.mark.proves("reference-defects/8-steady-use-unbound")
async def test_steady_use_counts_once_in_an_interval_and_unbinds_no_group(setting):
    """defects: activity-window: the debounce was inverted, and steady use was unbound after ten minutes."""
    setting.tracker.require_worker_group(A)
    untils = []
    for _ in range(2500):
        setting.report(Event.BUSY, in_flight=1)
        untils.append(setting.until())
        await setting.clock.advance(1.0)
        setting.tracker.advance()
    assert setting.tracker.status(A) is GroupStatus.ACTIVE
    assert sorted(set(untils))[:3] == [UNBIND + INTERVAL, UNBIND + 2 * INTERVAL, UNBIND + 3 * INTERVAL]
    assert len(set(untils)) == 2500 / INTERVAL


@pytest.mark.parametrize("event", [Event.REQUEST_COMPLETED, Event.STARTED, Event.IDLE, Event.STOPPING, Event.FAILED])
async def test_only_use_brings_an_unbound_group_back(setting, event):
    setting.tracker.adopt(A, GroupStatus.UNBOUND)
    setting.report(event)
    used = event is Event.REQUEST_COMPLETED
    assert setting.tracker.status(A) is (GroupStatus.ACTIVE if used else GroupStatus.UNBOUND)


def test_report_about_an_unknown_key_creates_nothing_unless_its_queue_is_there(setting):
    setting.report(Event.BUSY, in_flight=1)
    assert (setting.tracker.keys(), setting.worker_reports.all()) == ([], [])
    setting.queue_status.update(A, exists=True)
    setting.report(Event.BUSY, in_flight=1)
    assert setting.tracker.status(A) is GroupStatus.ACTIVE


async def test_memory_of_counted_keys_does_not_grow_with_keys_that_come_and_go(setting):
    for number in range(5_000):
        key = Key(str(number))
        setting.tracker.require_worker_group(key)
        setting.report(Event.BUSY, key)
        setting.tracker.retire(key)
        await setting.clock.advance(INTERVAL)
        setting.tracker.advance()
        setting.tracker.end(key)
    assert len(setting.processor._counted_at) <= 1_010


@pytest.mark.parametrize(
    ("headers", "labels"),
    [
        ({"x-status": b"ok", "x-route": "alerts", "x-priority": 0}, ("ok", "alerts", "0")),
        ({"x-status": "expired"}, ("expired", "", "default")),
        ({"x-status": "mine", "x-route": "made up", "x-priority": 17}, ("other", "other", "default")),
        ({"x-status": "retried", "x-priority": True}, ("retried", "", "default")),
    ],
    ids=["route", "no route", "made up", "no answer"],
)
def test_completed_requests_are_counted_by_status_route_and_priority_level(setting, headers, labels):
    setting.metrics.know_routes(["alerts"])
    setting.tracker.require_worker_group(A)
    report = ActivityReport(A, Event.REQUEST_COMPLETED, "w", {"count": 3}, headers)
    setting.process(Message(body=report.wire_body(), headers=report.wire_headers()))
    named = dict(zip(("status", "route", "priority"), labels, strict=True))
    assert setting.metrics.registry.get_sample_value("osrdyne_completed_total", named) == 3.0


def test_parts_of_a_start_count_once_and_reach_a_new_leader(setting):
    setting.tracker.require_worker_group(A)
    parts = {"jvm": 2500, "first_query": 700}
    # A new leader gets the state of a worker that an earlier one has started.
    setting.report(Event.BUSY, cold_start=parts, generation=[1, 1], in_flight=1)
    assert [worker.cold_start for worker in setting.worker_reports.all()] == [parts]
    count = "osrdyne_worker_cold_start_seconds_count"
    assert setting.metrics.registry.get_sample_value(count, {"part": "jvm"}) is None
    setting.report(Event.READY, cold_start={"jvm": 2500})
    setting.report(Event.READY, cold_start=parts, generation=[1, 1])
    assert setting.metrics.registry.get_sample_value(count, {"part": "jvm"}) == 1


def test_parts_of_the_start_of_a_process_are_counted_apart_from_those_of_workers():
    setting = Setting(processes=Mock(is_process=lambda worker_id: worker_id == "process"))
    report = ActivityReport(PROCESS_KEY, Event.READY, "process", {"cold_start": {"warm_up": 900, "other": 1}})
    setting.process(Message(body=report.wire_body(), headers=report.wire_headers()), PROCESS_KEY)
    value = setting.metrics.registry.get_sample_value
    assert value("osrdyne_process_start_seconds_sum", {"part": "warm_up"}) == 0.9
    assert value("osrdyne_process_start_seconds_count", {"part": "other"}) is None
    assert value("osrdyne_worker_cold_start_seconds_count", {"part": "warm_up"}) is None


def test_executor_seconds_count_once_also_for_a_later_leader(setting):
    setting.tracker.require_worker_group(A)

    def counted():
        return setting.metrics.registry.get_sample_value("osrdyne_executor_seconds_total")

    # An earlier leader has counted these.
    setting.report(Event.BUSY, executor_seconds=100.0, generation=[1, 1], in_flight=1)
    assert counted() == 0
    for seconds, total in [(103.5, 3.5), (103.5, 3.5), (float("inf"), 3.5), (-1, 3.5), (104, 4.0)]:
        setting.report(Event.BUSY, executor_seconds=seconds, in_flight=1)
        assert counted() == total
    assert [worker.executor_seconds for worker in setting.worker_reports.all()] == [104.0]
