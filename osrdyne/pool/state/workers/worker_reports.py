"""The state of each worker, from its activity reports.

Written by the activity processor; read by the worker groups loop, the API and the liveness check. A worker that was
found when the term began is STARTING until it has reported (defects: ready-after-restart); the leader asks it for a
report.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

from osrdyne.aio.clock import Clock
from osrdyne.aio.signals import ChangeFeed
from osrdyne.broker.management.listings import ListedQueue
from osrdyne.protocol.activity import (
    ALONE_FIELD,
    BLOCKED_FIELD,
    EXECUTORS,
    GENERATION_FIELD,
    REQUESTS_FIELD,
    STARVED_JOBS_FIELD,
    STUCK_FIELD,
    SUSPECTS_FIELD,
    WAITING_FIELD,
    WAITING_FOR_FIELD,
    ActivityReport,
    Event,
    cold_start_of,
    executor_seconds_of,
    named_requests,
    reloads_of,
    waiting_answers_of,
)
from osrdyne.protocol.control import Generation
from osrdyne.protocol.names import Key, started_as
from osrdyne.protocol.rates import RATE_FIELD, EventRate, rate_from_wire
from osrdyne.protocol.refusals import KeyRefusal, refusal_of

_K = TypeVar("_K")


class WorkerState(StrEnum):
    """The state of a worker, as reported by itself or by its driver."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    BUSY = "busy"
    IDLE = "idle"
    STOPPING = "stopping"
    FAILED = "failed"

    @property
    def serves(self) -> bool:
        """Whether the worker has loaded its data and takes requests."""
        return self in {WorkerState.READY, WorkerState.BUSY, WorkerState.IDLE}


_STATES: dict[Event, WorkerState] = {
    Event.STARTED: WorkerState.LOADING,
    Event.READY: WorkerState.READY,
    Event.REQUEST_RECEIVED: WorkerState.BUSY,
    Event.BUSY: WorkerState.BUSY,
    Event.REQUEST_COMPLETED: WorkerState.READY,
    Event.IDLE: WorkerState.IDLE,
    Event.STOPPING: WorkerState.STOPPING,
    Event.FAILED: WorkerState.FAILED,
}
_BEST_FIRST = (
    WorkerState.BUSY,
    WorkerState.READY,
    WorkerState.IDLE,
    WorkerState.LOADING,
    WorkerState.STARTING,
    WorkerState.STOPPING,
    WorkerState.FAILED,
)
MAX_TEXT = 64  # Maximum length of a text fingerprint in a report.
# Maximum number of completed requests in one report; a larger number is ignored, because no counter could hold it.
MAX_COUNT = 1_000_000
# Events of a worker that takes requests and works on them.
WORK = frozenset({Event.REQUEST_RECEIVED, Event.REQUEST_COMPLETED, Event.BUSY})
# Events that also report the end of a request. Workers of the OSRD reference send none of them.
_COMPLETIONS = frozenset({Event.REQUEST_COMPLETED, Event.IDLE, Event.BUSY})


@dataclass(frozen=True, slots=True)
class WorkerReportState:
    """The latest known state of one worker, since `at` (seconds since the epoch).

    `reason`: why it failed. `requests`: fingerprints of the requests that it ran then. `waiting`: of those that were in
    it and did not run. `heard_at`, `worked_at`: monotonic time of its latest report, and of its latest report about
    work. `counts_requests`: it has reported how many requests it runs, as workers do that implement the whole protocol.
    `paused`: it takes no requests for now.
    `generation`: of the last control message that it accepted, if it reports one. `completed`: requests that it has
    reported as completed. `suspects`: requests that it has put aside because they may have ended an earlier worker.
    `alone`: the text of the request that it runs with nothing else. `blocked`: the text of a request whose handler has
    blocked its event loop. `stuck`: the text of a request whose handler does
    not end. `is_assumed`: it has not reported, but its queue has a consumer that no other worker explains.
    `reports_completion`: it has reported the end of a request, or how many run; until it does, only its queue shows
    when it is idle. `waiting_for`: what its start or its requests wait for, such as executors. `cold_start`:
    milliseconds of each part of its start. `reloads`: the outcomes of its last reloads on request, by id.
    `executor_seconds`: how long its tasks have run, on one core; None if it does not report it.
    `rate`: the limit of its events; None: no limit, or not reported. `refusal`: the error with which its application
    refuses the key, until the worker groups loop has taken it. `waiting_answers`: how many of its answers their reply
    queues do not take, by reason.
    """

    worker_id: str
    key: Key
    state: WorkerState
    in_flight: int = 0
    at: float = 0.0
    reason: str | None = None
    requests: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    heard_at: float = -math.inf
    worked_at: float = -math.inf
    counts_requests: bool = False
    paused: bool = False
    generation: Generation | None = None
    completed: int = 0
    suspects: int = 0
    alone: str | None = None
    blocked: str | None = None
    stuck: str | None = None
    is_assumed: bool = False
    reports_completion: bool = False
    waiting_for: str | None = None
    cold_start: Mapping[str, int] = field(default_factory=dict)
    reloads: Mapping[str, str | None] = field(default_factory=dict)
    executor_seconds: float | None = None
    rate: EventRate | None = None
    refusal: KeyRefusal | None = None
    waiting_answers: Mapping[str, int] = field(default_factory=dict)


def apply_report(
    before: WorkerReportState | None, report: ActivityReport, *, at: float, now: float
) -> WorkerReportState:
    """Apply a report to the state of a worker; `at` on the wall clock, `now` on the monotonic clock."""
    after = before or WorkerReportState(report.worker_id, Key(report.key), WorkerState.STARTING)
    in_flight = report.details.get("in_flight")
    reason = report.details.get("reason")
    state = _STATES[report.event]
    running = in_flight if isinstance(in_flight, int) else (1 if state is WorkerState.BUSY else 0)
    if report.event is Event.REQUEST_COMPLETED and running > 0:
        state = WorkerState.BUSY
    counts = isinstance(in_flight, int)
    reports_completion = after.reports_completion or counts or report.event in _COMPLETIONS
    # Without reports of completed requests, received ones are counted: in the long run the numbers are equal.
    done = completed_requests(report) if reports_completion else received_requests(report)
    return replace(
        after,
        state=state,
        in_flight=running,
        at=at,
        reason=reason if isinstance(reason, str) else after.reason,
        requests=named_requests(report.details.get(REQUESTS_FIELD)),
        waiting=named_requests(report.details.get(WAITING_FIELD)),
        heard_at=now,
        worked_at=now if report.event in WORK else after.worked_at,
        counts_requests=after.counts_requests or counts,
        # Reports about requests do not say it, and a paused worker may run some.
        paused=paused if isinstance(paused := report.details.get("paused"), bool) else after.paused,
        generation=_generation(report.details.get(GENERATION_FIELD), before=after.generation),
        completed=after.completed + done,
        suspects=suspects if isinstance(suspects := report.details.get(SUSPECTS_FIELD), int) else 0,
        alone=_text(report.details.get(ALONE_FIELD)),
        blocked=_text(report.details.get(BLOCKED_FIELD)),
        stuck=_text(report.details.get(STUCK_FIELD)),
        is_assumed=False,
        reports_completion=reports_completion,
        waiting_for=_waiting_for(report),
        cold_start={**after.cold_start, **cold_start_of(report)},
        reloads=reloads_of(report) or after.reloads,
        executor_seconds=after.executor_seconds if (took := executor_seconds_of(report)) is None else took,
        rate=_rate(report, before=after.rate),
        refusal=refusal_of(report) or after.refusal,
        waiting_answers=waiting_answers_of(report),
    )


def _waiting_for(report: ActivityReport) -> str | None:
    """What the start of the worker waits for, or its jobs."""
    jobs = report.details.get(STARVED_JOBS_FIELD)
    if isinstance(jobs, int) and jobs > 0:
        return EXECUTORS
    return _text(report.details.get(WAITING_FOR_FIELD))


def _rate(report: ActivityReport, *, before: EventRate | None) -> EventRate | None:
    if RATE_FIELD not in report.details:
        return before  # reports about requests do not have it
    try:
        return rate_from_wire(report.details[RATE_FIELD])
    except ValueError:
        return before


def _text(value: object) -> str | None:
    """Return a text fingerprint, or None if it is invalid or too long."""
    return value if isinstance(value, str) and len(value) <= MAX_TEXT else None


def _generation(value: object, *, before: Generation | None) -> Generation | None:
    match value:
        case [int(term), int(counter)]:
            return Generation(term, counter)
        case _:
            return before


def completed_requests(report: ActivityReport) -> int:
    """How many requests a report declares completed; one report may stand for many."""
    return _count(report) if report.event is Event.REQUEST_COMPLETED else 0


def received_requests(report: ActivityReport) -> int:
    """How many requests a report declares received."""
    return _count(report) if report.event is Event.REQUEST_RECEIVED else 0


def _count(report: ActivityReport) -> int:
    count = report.details.get("count")
    return count if isinstance(count, int) and 0 < count <= MAX_COUNT else 1


class WorkerRegistry:
    """The reported state of every worker of the pool, in this term."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._workers: dict[str, WorkerReportState] = {}
        self._by_key: dict[Key, dict[str, None]] = {}
        self._replicas: dict[str, dict[str, None]] = {}
        self.feed: ChangeFeed[Key] = ChangeFeed()  # Keys with a worker whose state has changed.

    def __getitem__(self, worker_id: str) -> WorkerReportState | None:
        """The state of a worker; for an instance that runs a whole group, the combined state of its workers."""
        replicas = self.replicas(worker_id)
        return together(worker_id, replicas) if replicas else self._workers.get(worker_id)

    def replicas(self, worker_id: str) -> list[WorkerReportState]:
        """The workers that a platform has started for the one start with this id (decision 0015)."""
        return [self._workers[name] for name in self._replicas.get(worker_id, ())]

    def of_key(self, key: Key) -> list[WorkerReportState]:
        return [self._workers[name] for name in self._by_key.get(key, ())]

    def all(self) -> list[WorkerReportState]:
        return list(self._workers.values())

    def waiting_answers(self) -> dict[str, int]:
        """How many answers of all workers wait, by reason."""
        return dict(sum((Counter(worker.waiting_answers) for worker in self._workers.values()), Counter[str]()))

    def report(self, report: ActivityReport) -> None:
        before = self._workers.get(report.worker_id)
        after = apply_report(before, report, at=self._clock.time(), now=self._clock.monotonic())
        self._put(after)
        if before is None or before.state is not after.state:
            self.feed.notify(after.key)

    def take_refusals(self, key: Key) -> dict[str, KeyRefusal]:
        """The refusals that workers of a key have reported since the last call, by worker id."""
        refused = [worker for worker in self.of_key(key) if worker.refusal is not None]
        for worker in refused:
            self._workers[worker.worker_id] = replace(worker, refusal=None)
        return {worker.worker_id: worker.refusal for worker in refused if worker.refusal is not None}

    def assume_ready(self, worker_id: str, key: Key) -> None:
        """Assume that a worker that reports nothing consumes its queue, as one does that implements part of the
        protocol."""
        now, at = self._clock.monotonic(), self._clock.time()
        self._put(WorkerReportState(worker_id, key, WorkerState.READY, at=at, heard_at=now, is_assumed=True))
        self.feed.notify(key)

    def is_opaque(self, worker_id: str) -> bool:
        """Whether only its queue shows if it runs a request: it reports no completed requests, or nothing at all."""
        worker = self[worker_id]
        silent = worker is not None and worker.state is WorkerState.BUSY and not worker.reports_completion
        return silent or self.is_assumed(worker_id)

    def note_empty_queue(self, key: Key, *, sampled_after: float) -> None:
        """Mark workers of a key as idle, because its queue had neither ready nor unacknowledged messages in a sample
        taken after that moment (monotonic): those that do not report completion and have not reported since."""
        for worker in self.of_key(key):
            silent = worker.state is WorkerState.BUSY and not worker.reports_completion
            if silent and worker.heard_at <= sampled_after:
                self._put(replace(worker, state=WorkerState.IDLE, in_flight=0, requests=(), waiting=()))
                self.feed.notify(key)

    def take_listing(self, listed: Iterable[ListedQueue]) -> None:
        """Take a listing of the request queues: workers of empty queues that do not report completion are idle."""
        for queue in listed:
            if queue.messages == 0 and queue.whole:
                self.note_empty_queue(queue.key, sampled_after=queue.sampled_after)

    def is_assumed(self, worker_id: str) -> bool:
        """Whether it has not reported since it was assumed to be ready."""
        worker = self[worker_id]
        return worker is not None and worker.is_assumed

    def _put(self, worker: WorkerReportState) -> None:
        self._drop(worker.worker_id)
        self._workers[worker.worker_id] = worker
        self._by_key.setdefault(worker.key, {})[worker.worker_id] = None
        start = started_as(worker.worker_id)
        if start != worker.worker_id:
            self._replicas.setdefault(start, {})[worker.worker_id] = None

    def forget(self, worker_id: str) -> None:
        """Forget a worker, or all workers of an instance."""
        for name in [worker_id, *self._replicas.get(worker_id, ())]:
            self._drop(name)

    def _drop(self, worker_id: str) -> None:
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            _discard(self._by_key, worker.key, worker_id)
            _discard(self._replicas, started_as(worker_id), worker_id)

    def forget_group(self, key: Key) -> None:
        """Forget all workers of a group that has ended, including those that no driver listed."""
        for worker_id in list(self._by_key.get(key, ())):
            self.forget(worker_id)


def together(worker_id: str, replicas: Sequence[WorkerReportState]) -> WorkerReportState:
    """Combine several workers: the best state counts, and the requests of all."""
    best = min(replicas, key=lambda worker: _BEST_FIRST.index(worker.state))
    return replace(
        best,
        worker_id=worker_id,
        in_flight=sum(worker.in_flight for worker in replicas),
        requests=tuple(request for worker in replicas for request in worker.requests),
        waiting=tuple(request for worker in replicas for request in worker.waiting),
        completed=sum(worker.completed for worker in replicas),
        reports_completion=all(worker.reports_completion for worker in replicas),
        heard_at=max(worker.heard_at for worker in replicas),
    )


def _discard(index: dict[_K, dict[str, None]], key: _K, worker_id: str) -> None:
    names = index.get(key)
    if names is not None:
        names.pop(worker_id, None)
        if not names:
            del index[key]
