"""How long a start is expected to take."""

from __future__ import annotations

from osrdyne.pool.state.workers.start_durations import KEPT, StartDurations
from osrdyne.pool.state.workers.worker_reports import WorkerRegistry
from osrdyne.protocol.activity import ActivityReport, Event
from osrdyne.testing.clock import VirtualClock


def test_median_of_the_latest_starts_counts() -> None:
    durations = StartDurations(WorkerRegistry(VirtualClock()))
    durations.note(900.0)
    for _ in range(KEPT):
        durations.note(4.0)
    durations.note(100.0)
    assert durations.typical() == 4.0


def test_without_a_measured_start_the_reports_of_running_workers_count() -> None:
    reports = WorkerRegistry(VirtualClock())
    durations = StartDurations(reports)
    assert durations.typical() is None
    parts = {"process": 500, "jvm": 2500, "load": 1000}
    reports.report(ActivityReport("a", Event.READY, "w", {"cold_start": parts}))
    reports.report(ActivityReport("a", Event.REQUEST_COMPLETED, "w", {"first_request_ms": 9000}))
    assert durations.typical() == 4.0
