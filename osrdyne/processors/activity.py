"""The activity processor: summarises the reports of workers for the tracker.

For each key, the first report of use in an interval of `lifecycle.extra_lifetime` counts and requires the group for one
interval more, so that the other reports can be ignored. Reports may be lost and may name unknown keys: a report alone
never creates a group.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from osrdyne.amqp import Delivery
from osrdyne.amqp.consumer import Consumer
from osrdyne.errors import InvalidKeyError, InvalidMessageError
from osrdyne.logs import Logger, get_logger
from osrdyne.metrics import OTHER
from osrdyne.pool.context import TermContext
from osrdyne.pool.routing.circuits import ActiveCircuits
from osrdyne.pool.state.groups.tracker import PoolStateTracker
from osrdyne.pool.state.observed import QueueStatuses
from osrdyne.pool.state.workers.crashes import DeathRegister
from osrdyne.pool.state.workers.worker_reports import WORK, WorkerRegistry, completed_requests
from osrdyne.processors.consumers import ErrorBoundary
from osrdyne.processors.forgeries import Forgeries
from osrdyne.protocol.activity import (
    COMPLETED_CODE_HEADER,
    COMPLETED_PRIORITY_HEADER,
    COMPLETED_PROBE_HEADER,
    COMPLETED_ROUTE_HEADER,
    COMPLETED_WITHOUT_ANSWER,
    FORGED_FIELD,
    PROCESS_START_PARTS,
    REPLY_TO_REFUSED,
    RETRIED,
    RETURNED_FIELD,
    ActivityReport,
    Event,
    cold_start_of,
    executor_seconds_of,
    is_of_state,
    named_requests,
    outcomes_of,
    report_from_wire,
)
from osrdyne.protocol.messages import STATUS_HEADER
from osrdyne.protocol.names import PRIORITIES, Key, WorkerId, parse_key
from osrdyne.protocol.pooled import PROCESS_KEY, ProcessState, process_state_of
from osrdyne.protocol.statuses import Status, decode_text

PREFETCH = 1000
# The most that one report adds to a counter of forged messages; a report may claim any number.
MAX_COUNTED = 1_000_000


class ProcessReports(Protocol):
    """The pooled driver, as the receiver of the reports of its processes."""

    def take_state(self, worker_id: WorkerId, state: ProcessState) -> None: ...

    def is_process(self, worker_id: WorkerId) -> bool: ...


class ActivityProcessor:
    """Consumes `P-activity`. Calls `on_report` for each report of a known group, and `on_retried` with the group,
    priority level and route of requests that wait for another attempt."""

    def __init__(
        self,
        context: TermContext,
        *,
        tracker: PoolStateTracker,
        queue_status: QueueStatuses,
        worker_reports: WorkerRegistry,
        forgeries: Forgeries,
        processes: ProcessReports | None = None,
        on_report: Callable[[Key, WorkerId], Awaitable[None]],
        on_retried: Callable[[Key, int | None, str | None], None],
        circuits: ActiveCircuits,
        crashes: DeathRegister,
    ) -> None:
        self._names, self._clock, self._metrics = context.names, context.clock, context.metrics
        self._interval = context.settings.lifecycle.extra_lifetime
        self._tracker = tracker
        self._queue_status = queue_status
        self._worker_reports = worker_reports
        self._forgeries = forgeries
        self._processes = processes
        self._on_report = on_report
        self._on_retried = on_retried
        self._circuits = circuits
        self._crashes = crashes
        self._counted_at: dict[Key, float] = {}
        self._log: Logger = get_logger("activity", pool=self._names.pool)

    async def run(self, consumer: Consumer) -> None:
        """Process reports until the consumer ends."""
        async for delivery in consumer:
            with ErrorBoundary(delivery, self._log) as boundary:
                report = self.process(delivery)
                # A worker that stops needs no repeated cancels: it requeues the requests that it does not finish.
                if report is not None and report.event is not Event.STOPPING:
                    await self._on_report(Key(report.key), WorkerId(report.worker_id))
                    # Crash before: the worker reports to the next leader, which pauses or resumes it then.
                    await self._circuits.take_report(report)
            if boundary.failed:
                self._count_invalid()
            # Crash before: the report is counted twice. That is harmless: it prolongs the life of a group, or adds to a
            # metric.
            await delivery.ack()

    def process(self, delivery: Delivery) -> ActivityReport | None:
        """Process one report; None if it is malformed or its group is unknown."""
        if self._forgeries.is_forged(delivery, self._names.activity_exchange, queue="activity"):
            return None
        report = report_from_wire(routing_key=delivery.routing_key, headers=delivery.headers, body=delivery.body)
        try:
            if report is None:
                raise InvalidKeyError("The message is not an activity report.")
            key = parse_key(report.key)
        except InvalidKeyError as error:
            self._count_invalid()
            self._log.debug("activity report ignored", error=str(error))
            return None
        self._metrics.activity.labels(event=report.event.value).inc()
        if self._is_of_process(report):
            # Before the check of the key: processes report under a key of their own, which has no group.
            return None
        if not self._is_known(key):
            # A late report of an ended group must not create state that nothing would remove.
            return None
        if not report.worker_id:  # a worker of the reference implementation: its work only keeps the group active
            self._count_use(key, report)
            return None
        self._count_executor_seconds(report)
        self._worker_reports.report(report)
        if returned := named_requests(report.details.get(RETURNED_FIELD)):
            self._crashes.note_returned(key, returned)
        # Each start counts once, however often the worker repeats its state.
        for part, milliseconds in ({} if is_of_state(report) else cold_start_of(report)).items():
            self._metrics.cold_start_seconds.labels(part=part).observe(milliseconds / 1000)
        forged = report.details.get(FORGED_FIELD)
        if isinstance(forged, int) and 0 < forged < MAX_COUNTED:
            self._forgeries.count("control", messages=forged, worker_id=report.worker_id)
        if report.event is Event.REQUEST_COMPLETED:
            self._count_completed(key, report)
        self._count_use(key, report)
        return report

    def _is_of_process(self, report: ActivityReport) -> bool:
        """Whether a pooled process has sent the report, and not a worker whose key is equal to that of processes. The
        driver gets the state of the process; of its other events only the parts of its start are recorded."""
        if self._processes is None:
            # Without pooled workers such a report comes from a process of earlier settings: it is dropped.
            return report.event is Event.PROCESS_STATE
        worker_id = WorkerId(report.worker_id)
        if report.event is not Event.PROCESS_STATE:
            if report.key != PROCESS_KEY or not self._processes.is_process(worker_id):
                return False
            for part, milliseconds in cold_start_of(report, known=PROCESS_START_PARTS).items():
                self._metrics.process_start_seconds.labels(part=part).observe(milliseconds / 1000)
            return True
        try:
            self._processes.take_state(worker_id, process_state_of(report))
        except InvalidMessageError as error:
            self._count_invalid()
            self._log.warning("process state invalid", process=worker_id, error=str(error))
        return True

    def _count_executor_seconds(self, report: ActivityReport) -> None:
        """Count the seconds since the worker's latest report in this term: earlier leaders have counted the others."""
        known, now = self._worker_reports[report.worker_id], executor_seconds_of(report)
        if known is not None and known.executor_seconds is not None and now is not None:
            self._metrics.executor_seconds.inc(max(0.0, now - known.executor_seconds))

    def _count_invalid(self) -> None:
        self._metrics.invalid_messages.labels(queue="activity").inc()

    def _count_completed(self, key: Key, report: ActivityReport) -> None:
        status = decode_text(report.headers.get(STATUS_HEADER))
        route = decode_text(report.headers.get(COMPLETED_ROUTE_HEADER))
        priority = _read_priority(report.headers.get(COMPLETED_PRIORITY_HEADER))
        code = report.headers.get(COMPLETED_CODE_HEADER)
        self._circuits.record(
            route or None,
            key,
            outcomes_of(report),
            status=status or "",
            code=code if isinstance(code, int) else None,
            probe_id=decode_text(report.headers.get(COMPLETED_PROBE_HEADER)) or None,
        )
        if status == RETRIED:
            self._on_retried(key, priority, route)
        if status == REPLY_TO_REFUSED:
            self._forgeries.count_reply_to(
                "worker", key=key, reason="a worker refused it", requests=min(completed_requests(report), MAX_COUNTED)
            )
        # Routes that no manifest names share one label: workers could otherwise create any number of time series.
        labels = self._metrics.of_route(route, priority)
        known = status if status in list(Status) or status in COMPLETED_WITHOUT_ANSWER else OTHER
        self._metrics.completed.labels(status=known, **labels).inc(completed_requests(report))

    def _is_known(self, key: Key) -> bool:
        return self._tracker.status(key) is not None or self._queue_status[key].exists

    def _count_use(self, key: Key, report: ActivityReport) -> None:
        # Started and ready are not use: a worker that crashes repeatedly would keep its group up without end, and every
        # take-over, which asks all workers for a report, would keep idle groups.
        if report.event not in WORK or self._tracker.is_retired(key):
            return
        now = self._clock.monotonic()
        counted_at = self._counted_at.get(key)
        # The group is required for at least this long anyway, so that one report of many suffices.
        if counted_at is not None and now - counted_at < self._interval:
            return
        self._counted_at[key] = now
        self._tracker.require_worker_group(key, self._interval)
        if len(self._counted_at) > 4 * len(self._tracker) + 1000:
            self._counted_at = {key: at for key, at in self._counted_at.items() if now - at < self._interval}


def _read_priority(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value in PRIORITIES else None
