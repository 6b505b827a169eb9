"""Liveness: finds workers that run but do not work, and has them replaced.

A worker that the driver reports as running may hang (SIGSTOP, a blocked event loop), be cut off from RabbitMQ, or have
lost its consumer. A group becomes suspicious when a busy worker stops reporting, when requests wait and no worker takes
one, or when a worker has been silent for long. The group is then asked for reports, twice, because a control message
may get lost. A worker that does not answer is replaced, and so is one that answers but takes no request while requests
wait. A worker that has never reported how many requests it runs speaks only part of the protocol; RabbitMQ's consumer
timeout applies to it.

A worker whose pause differs from that of its group has missed a control message; one that reports a later generation
than the leader's follows another sender. It is sent the message again, twice, and then replaced. This module stops no
worker itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from osrdyne.broker.management.listings import ListedQueue
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.state.groups.paused_groups import PausedGroups
from osrdyne.pool.state.groups.tracker import PoolStateTracker
from osrdyne.pool.state.workers.instances import InstanceInventory, InventoryEntry
from osrdyne.pool.state.workers.worker_reports import WorkerRegistry, WorkerReportState, WorkerState
from osrdyne.pool.workers.control import WorkerControl
from osrdyne.pool.workers.loop import WorkerGroupsLoop
from osrdyne.protocol.control import Generation
from osrdyne.protocol.names import Key, started_as

QUIET_AFTER = 300.0  # Seconds of silence after which a worker is asked for a report.
SUSPICION_LASTS = 900.0  # Seconds after which an unresolved suspicion is dropped; the next one asks again.
ASKED = 2  # How often a group is asked before silence counts.
SILENT = "it did not answer"
IDLE_ANYWAY = "it took no requests although some waited"

STAYS_PAUSED = "it takes no requests and does not resume"
IGNORES_PAUSE = "its group is paused, and it goes on taking requests"
AHEAD = "it follows control messages that this leader did not send"


@dataclass(slots=True)
class Suspicion:
    """A group that may not work. Times are monotonic: `since` the suspicion, `asked_at` the latest question.

    `waiting_since`, `waiting_at`: the first and the latest of consecutive listings with waiting requests.
    """

    since: float
    asked: int = 0
    asked_at: float = 0.0
    waiting_since: float | None = None
    waiting_at: float = 0.0


@dataclass(slots=True)
class Deviation:
    """A worker that deviates from the state of its group: how often it was sent a message, and when last."""

    asked: int = 0
    asked_at: float = -math.inf


def deviates(worker: WorkerReportState, generation: Generation, *, paused: bool) -> str | None:
    """How a serving worker deviates from the state of its group; None if it does not.

    `paused`: whether a circuit pauses its group. `generation`: the leader's, which no message of it exceeds.
    """
    if not worker.state.serves:
        return None
    if worker.generation is not None and worker.generation > generation:
        return AHEAD
    # A worker that reports no generation does not follow control messages at all.
    if paused and not worker.paused:
        return IGNORES_PAUSE if worker.generation is not None else None
    return STAYS_PAUSED if worker.paused and not paused else None


def is_suspicious(worker: WorkerReportState, *, now: float, patience: float) -> bool:
    """Whether a report of the worker is overdue."""
    limit = patience if worker.state is WorkerState.BUSY else QUIET_AFTER
    return is_expected_to_work(worker) and now - worker.heard_at > limit


def is_expected_to_work(worker: WorkerReportState) -> bool:
    """Whether the worker is expected to report and to take requests."""
    return worker.counts_requests and worker.state.serves and not worker.paused


def find_hanging(
    workers: Iterable[WorkerReportState], suspicion: Suspicion, *, now: float, patience: float
) -> Mapping[str, str] | None:
    """Return the hanging workers by id, with the reason; empty if there is none, None while that is undecided."""
    expected = [worker for worker in workers if is_expected_to_work(worker)]
    # A report since the suspicion shows that the worker lives. One that takes no requests anyway is found below.
    silent = {worker.worker_id: SILENT for worker in expected if worker.heard_at < suspicion.since}
    if silent:
        # Undecided until all questions are asked and the latest has had time to be answered.
        return silent if suspicion.asked >= ASKED and now - suspicion.asked_at > patience / 2 else None
    if suspicion.waiting_since is None or any(worker.worked_at >= suspicion.waiting_since for worker in expected):
        return {}
    if suspicion.waiting_at - suspicion.waiting_since < patience:
        return None  # requests have not waited for long enough
    return {worker.worker_id: IDLE_ANYWAY for worker in expected}


class WorkerLiveness:
    """Detects hanging workers, asks them for reports, and has them replaced."""

    def __init__(
        self,
        context: TermContext,
        *,
        tracker: PoolStateTracker,
        worker_reports: WorkerRegistry,
        instances: InstanceInventory,
        control: WorkerControl,
        worker_loop: WorkerGroupsLoop,
        paused: PausedGroups,
    ) -> None:
        self._tracker = tracker
        self._worker_reports = worker_reports
        self._instances = instances
        self._control = control
        self._worker_loop = worker_loop
        self._paused = paused
        self._patience = context.settings.worker.silence_timeout
        self._clock = context.clock
        self._suspicions: dict[Key, Suspicion] = {}
        self._deviations: dict[str, Deviation] = {}
        self._log: Logger = get_logger("liveness")

    async def run(self) -> None:
        """Check at intervals. Runs until cancelled."""
        while True:
            await self._clock.sleep(self._patience / 2)
            await self.check()

    def take_listing(self, listed: Iterable[ListedQueue]) -> None:
        """Take a listing of the request queues: a group with requests and no recent work becomes suspicious."""
        now = self._clock.monotonic()
        for queue in listed:
            suspicion = self._suspicions.get(queue.key)
            if suspicion is None and queue.messages and self._is_at_rest(queue.key, now):
                suspicion = self._suspicions[queue.key] = Suspicion(since=now)
            # No request waits any more: the time without work counts anew from the next one that does.
            if suspicion is not None and queue.ready == 0:
                suspicion.waiting_since = None
            elif suspicion is not None:
                suspicion.waiting_at = now
                suspicion.waiting_since = now if suspicion.waiting_since is None else suspicion.waiting_since

    def _is_at_rest(self, key: Key, now: float) -> bool:
        expected = [worker for worker in self._worker_reports.of_key(key) if is_expected_to_work(worker)]
        return bool(expected) and all(now - worker.worked_at > self._patience for worker in expected)

    async def check(self) -> None:
        """Check all workers once."""
        await self._correct_deviations()
        now = self._clock.monotonic()
        for worker in self._worker_reports.all():
            if is_suspicious(worker, now=now, patience=self._patience):
                self._suspicions.setdefault(worker.key, Suspicion(since=now))
        for key, suspicion in list(self._suspicions.items()):
            hanging = find_hanging(self._worker_reports.of_key(key), suspicion, now=now, patience=self._patience)
            # Workers of a group that ends are not asked: they are stopped anyway.
            if hanging is None and self._tracker.status(key) is not None and now - suspicion.since < SUSPICION_LASTS:
                await self._ask_group(key, suspicion)
            else:
                del self._suspicions[key]
                self._replace_hanging(key, hanging or {})

    async def _correct_deviations(self) -> None:
        """Send workers the state of their group again if they deviate, and have those replaced that still do."""
        found = {
            worker.worker_id: (worker, why)
            for worker in self._worker_reports.all()
            if (why := self._deviation_of(worker)) is not None
        }
        self._deviations = {name: self._deviations.get(name) or Deviation() for name in found}
        asked: set[Key] = set()  # one message reaches all workers of a group
        for name, (worker, why) in found.items():
            deviation = self._deviations[name]
            if self._clock.monotonic() - deviation.asked_at < self._patience / 2:
                continue
            if deviation.asked >= ASKED:
                del self._deviations[name]
                self._replace_hanging(worker.key, {name: why})
            elif worker.key in asked or await self._control.ask_for_reports(worker.key):
                asked.add(worker.key)
                self._log.info("worker asked to follow its group", key=worker.key, worker_id=name, why=why)
                deviation.asked += 1
                deviation.asked_at = self._clock.monotonic()

    def _deviation_of(self, worker: WorkerReportState) -> str | None:
        return deviates(worker, self._tracker.generation, paused=self._paused.is_paused(worker.key))

    async def _ask_group(self, key: Key, suspicion: Suspicion) -> None:
        if suspicion.asked >= ASKED or self._clock.monotonic() - suspicion.asked_at < self._patience / 2:
            return
        if await self._control.ask_for_reports(key):
            suspicion.asked += 1
            suspicion.asked_at = self._clock.monotonic()

    def _replace_hanging(self, key: Key, hanging: Mapping[str, str]) -> None:
        """Have hanging instances replaced; forget hanging workers of no instance, or of one that is not replaced."""
        instances = {str(entry.instance.worker_id): self._workers_of(entry) for entry in self._instances.of_key(key)}
        # An instance that runs a whole group is replaced only if all of its workers hang.
        replaced = {name: hanging[workers[0]] for name, workers in instances.items() if hanging.keys() >= set(workers)}
        for worker_id, why in hanging.items():
            self._log.warning("worker hangs", key=key, worker_id=worker_id, why=why)
            # Reports of a worker that no listed instance has started must not count as service.
            if started_as(worker_id) not in replaced:
                self._worker_reports.forget(worker_id)
        if replaced:
            self._worker_loop.replace_hanging(key, replaced)

    def _workers_of(self, entry: InventoryEntry) -> list[str]:
        """The worker of an instance; for an instance that runs a whole group (a Deployment), the workers that have
        reported."""
        name = entry.instance.worker_id
        return [worker.worker_id for worker in self._worker_reports.replicas(name)] or [name]
