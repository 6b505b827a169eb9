"""What workers report of themselves."""

from __future__ import annotations

import pytest

from osrdyne.pool.state.workers.worker_reports import WorkerRegistry, WorkerState, apply_report
from osrdyne.protocol.activity import ActivityReport, Event
from osrdyne.protocol.names import Key
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
def test_report_sets_the_state(activity: ActivityReport, state: WorkerState, in_flight: int) -> None:
    after = apply_report(None, activity, at=5.0, now=7.0)
    assert (after.worker_id, after.key, after.state, after.in_flight, after.at) == ("w", A, state, in_flight, 5.0)


def test_reason_of_a_failure_is_kept_until_another_is_reported() -> None:
    failed = apply_report(None, report(Event.FAILED, reason="no data"), at=1.0, now=1.0)
    assert apply_report(failed, report(Event.STOPPING), at=2.0, now=2.0).reason == "no data"


def test_parts_of_a_cold_start_come_with_ready_and_with_the_first_request() -> None:
    parts = {"process": 400, "jvm": 2500, "load": -1, "session": True, "python": "fast", "shoe size": 42}
    ready = apply_report(None, report(Event.READY, cold_start=parts), at=1.0, now=1.0)
    assert ready.cold_start == {"process": 400, "jvm": 2500}
    busy = apply_report(ready, report(Event.BUSY, cold_start={"jvm": 1}), at=2.0, now=2.0)
    served = apply_report(busy, report(Event.REQUEST_COMPLETED, first_request_ms=700), at=3.0, now=3.0)
    later = apply_report(served, report(Event.REQUEST_COMPLETED), at=4.0, now=4.0)
    assert later.cold_start == {"process": 400, "jvm": 2500, "first_query": 700}


def test_only_a_change_of_state_wakes_anybody() -> None:
    registry = WorkerRegistry(VirtualClock())
    changes = registry.feed.subscribe()
    for event in (Event.READY, Event.READY):
        registry.report(report(event))
    assert changes.take() == [A]
    registry.report(report(Event.READY))
    assert changes.take() == []
