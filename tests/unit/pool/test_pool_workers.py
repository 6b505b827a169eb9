"""What workers report of themselves: their states, those of replicas, and how long a start took."""

import pytest

from osrdyne.pool.state.workers.start_durations import KEPT, StartDurations
from osrdyne.pool.state.workers.worker_reports import WorkerRegistry, WorkerState, apply_report
from osrdyne.protocol.activity import ActivityReport, Event
from osrdyne.protocol.names import Key, WorkerId, replica_id, started_as
from osrdyne.testing.clock import VirtualClock

A = Key("a")


def report(event: Event, worker_id: str = "w", key: str = A, **details: object) -> ActivityReport:
    return ActivityReport(key, event, worker_id, details)


ROWS = {
    "started": (report(Event.STARTED), WorkerState.LOADING, 0),
    "ready": (report(Event.READY), WorkerState.READY, 0),
    "one request, not counted": (report(Event.REQUEST_RECEIVED), WorkerState.BUSY, 1),
    "busy with three": (report(Event.BUSY, in_flight=3), WorkerState.BUSY, 3),
    "the last one done": (report(Event.REQUEST_COMPLETED, in_flight=0), WorkerState.READY, 0),
    "one done, others running": (report(Event.REQUEST_COMPLETED, in_flight=2), WorkerState.BUSY, 2),
    "done, not counted": (report(Event.REQUEST_COMPLETED), WorkerState.READY, 0),
    "idle": (report(Event.IDLE), WorkerState.IDLE, 0),
    "stopping": (report(Event.STOPPING), WorkerState.STOPPING, 0),
    "failed": (report(Event.FAILED, reason="no data"), WorkerState.FAILED, 0),
    "a count that is none": (report(Event.BUSY, in_flight="many"), WorkerState.BUSY, 1),
}


@pytest.mark.parametrize(("activity", "state", "in_flight"), ROWS.values(), ids=ROWS.keys())
def test_report_sets_the_state(activity, state, in_flight):
    after = apply_report(None, activity, at=5.0, now=7.0)
    assert (after.worker_id, after.key, after.state, after.in_flight, after.at) == ("w", A, state, in_flight, 5.0)


def test_reason_of_a_failure_is_kept_until_another_is_reported():
    failed = apply_report(None, report(Event.FAILED, reason="no data"), at=1.0, now=1.0)
    assert apply_report(failed, report(Event.STOPPING), at=2.0, now=2.0).reason == "no data"


def test_parts_of_a_cold_start_come_with_ready_and_with_the_first_request():
    parts = {"process": 400, "jvm": 2500, "load": -1, "session": True, "python": "fast", "shoe size": 42}
    worker = apply_report(None, report(Event.READY, cold_start=parts), at=1.0, now=1.0)
    assert worker.cold_start == {"process": 400, "jvm": 2500}
    for event, details in (
        (Event.BUSY, {"cold_start": {"jvm": 1}}),
        (Event.REQUEST_COMPLETED, {"first_request_ms": 700}),
        (Event.REQUEST_COMPLETED, {}),
    ):
        worker = apply_report(worker, ActivityReport(A, event, "w", details), at=2.0, now=2.0)
    assert worker.cold_start == {"process": 400, "jvm": 2500, "first_query": 700}


def test_only_a_change_of_state_is_announced(registry):
    changes = registry.feed.subscribe()
    for event in (Event.READY, Event.READY):
        registry.report(report(event))
    assert changes.take() == [A]
    registry.report(report(Event.READY))
    assert changes.take() == []


@pytest.fixture
def registry():
    return WorkerRegistry(VirtualClock())


def test_instance_serves_when_one_of_its_workers_does_and_runs_what_all_of_them_run(registry):
    assert (replica_id(WorkerId("w"), "one.d"), started_as("w.one.d"), started_as("w")) == ("w.one.d", "w", "w")
    registry.assume_ready("w", A)
    assert registry["w"].state is WorkerState.READY
    registry.report(report(Event.STARTED, "w.one"))
    assert registry["w"].state is WorkerState.LOADING
    registry.report(report(Event.READY, "w.two"))
    assert (registry["w"].state, registry["w.one"].state) == (WorkerState.READY, WorkerState.LOADING)
    registry.report(report(Event.BUSY, "w.one", in_flight=2))
    registry.report(report(Event.BUSY, "w.two", in_flight=1))
    assert (registry["w"].worker_id, registry["w"].state, registry["w"].in_flight) == ("w", WorkerState.BUSY, 3)
    assert (registry["v"], registry.replicas("v")) == (None, [])


def test_forgetting_an_instance_forgets_its_workers(registry):
    registry.report(report(Event.READY, "w.one"))
    registry.report(report(Event.READY, "w.two"))
    registry.report(report(Event.READY, "v"))
    registry.forget("w.one")
    assert [worker.worker_id for worker in registry.replicas("w")] == ["w.two"]
    registry.forget("w")
    registry.forget("w")
    assert ([worker.worker_id for worker in registry.all()], registry["w"]) == (["v"], None)


def test_median_of_the_latest_starts_counts_and_without_one_the_reports_of_running_workers(registry):
    durations = StartDurations(registry)
    assert durations.typical() is None
    registry.report(report(Event.READY, cold_start={"process": 500, "jvm": 2500, "load": 1000}))
    registry.report(report(Event.REQUEST_COMPLETED, first_request_ms=9000))
    assert durations.typical() == 4.0
    for seconds in (900.0, *[5.0] * KEPT, 100.0):
        durations.note(seconds)
    assert durations.typical() == 5.0
