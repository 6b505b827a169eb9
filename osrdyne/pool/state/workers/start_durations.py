"""How long the latest starts of workers took, for the expected time of the next ones. No I/O.

The worker groups loop writes it. A term begins without a measured start; until it has one, the durations that running
workers have reported (`cold_start`) are used, so that a new leader can also estimate.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from osrdyne.pool.state.workers.worker_reports import WorkerRegistry
from osrdyne.protocol.activity import FIRST_REQUEST_PART

KEPT = 16  # Latest starts that count; with fewer, one slow start would decide.


class StartDurations:
    """The durations of one term, in seconds from the driver's start of a worker until it was ready."""

    def __init__(self, worker_reports: WorkerRegistry) -> None:
        self._worker_reports = worker_reports
        self._latest: deque[float] = deque(maxlen=KEPT)

    def note(self, seconds: float) -> None:
        """Record a worker that has become ready."""
        self._latest.append(seconds)

    def typical(self) -> float | None:
        """The median of the latest starts in seconds; None without a measured or reported one."""
        if self._latest:
            return median(self._latest)
        reported = [
            sum(took for part, took in worker.cold_start.items() if part != FIRST_REQUEST_PART) / 1000
            for worker in self._worker_reports.all()
            if worker.cold_start
        ]
        return median(reported) if reported else None
