"""The daemon's state for the API: the state of the present term as values of `pool.views`, and the actions of the API.

Reads and forwards; it decides nothing. Built by the daemon, used by the HTTP API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from osrdyne.aio.clock import Clock
from osrdyne.broker.management.client import ManagementClient
from osrdyne.daemon.leader_address import LeaderAddress
from osrdyne.daemon.term import Term
from osrdyne.drivers.base import Driver, Instance, InstanceState
from osrdyne.drivers.pooled.process import Process, split_id
from osrdyne.errors import BrokerError, LeadershipLostError, PoolConflictError
from osrdyne.ingress.explain import Explanation, explain
from osrdyne.ingress.requests import Arrival
from osrdyne.pool.routing.manifest_store import KeptManifest, ManifestChange, ManifestKind
from osrdyne.pool.state.backlog import Waiting
from osrdyne.pool.state.groups import GroupStatus
from osrdyne.pool.state.observed import ObservedQueue, ObservedWorkers
from osrdyne.pool.state.pins import PinStore
from osrdyne.pool.state.worker_reports import WorkerState
from osrdyne.pool.views import (
    ComponentView,
    GroupView,
    LeadershipView,
    PoisonPage,
    PoisonQuery,
    ProcessStatus,
    ProcessView,
    QueueView,
    WaitingView,
    WorkerView,
)
from osrdyne.protocol.names import PRIORITIES, Key, PoolNames, started_as
from osrdyne.protocol.poison import PoisonOutcome, PoisonRecord
from osrdyne.protocol.pooled import ProcessMemory

FIND_TIMEOUT = 2.0  # Seconds for RabbitMQ to say where the leader is.


@dataclass(slots=True)
class DaemonState:
    """What the daemon is doing now; written by its leadership loop only."""

    term: Term | None = None
    components: dict[str, ComponentView] = field(default_factory=dict)

    def note(self, name: str, *, ok: bool, detail: str, fatal: bool = True) -> None:
        self.components[name] = ComponentView(name, ok, detail, fatal=fatal)


class DaemonInspector:
    """Implements `PoolInspector` for a running daemon."""

    def __init__(
        self,
        *,
        pool: str,
        state: DaemonState,
        driver: Driver,
        management: ManagementClient,
        pins: PinStore,
        leader: LeaderAddress,
        own_url: Callable[[], str],
        clock: Clock,
    ) -> None:
        self._names = PoolNames(pool)
        self._state = state
        self._driver = driver
        self._management = management
        self._pins = pins
        self._leader = leader
        self._own_url = own_url
        self._clock = clock

    @property
    def pool(self) -> str:
        return self._names.pool

    def leadership(self) -> LeadershipView:
        term = self._state.term
        if term is None:
            waiting = self._state.components.get("leadership")
            return LeadershipView(False, None, None, waiting.detail if waiting else "starting")
        return LeadershipView(True, term.state.tracker.generation.term, term.since, "leading")

    async def leader(self) -> str | None:
        own = self._own_url()
        if self._state.term is not None:
            return own
        announced = None
        with suppress(BrokerError, TimeoutError):  # a health check must not wait for long
            async with asyncio.timeout(FIND_TIMEOUT):
                announced = await self._leader.find()
        return None if announced == own else announced

    def components(self) -> list[ComponentView]:
        found = [*self._state.components.values()]
        if self._state.term is not None and (off := self._state.term.routing.routes.retries_off):
            reason = " ".join(sorted(set(off.values())))
            found.append(
                ComponentView("retries", False, f"off for routes {', '.join(sorted(off))}. {reason}", fatal=False)
            )
        if self._state.term is not None and (silent := self._state.term.routing.routes.levels.silent):
            keys = ", ".join(sorted({repr(key) for key in silent.values()})[:5])
            reason = f"{len(silent)} workers do not report for the priorities of their group, such as those of {keys}"
            found.append(ComponentView("worker priorities", False, reason, fatal=False))
        if self._state.term is not None:
            topology = self._state.term.routing.topology.finding()
            found.append(ComponentView(topology.subject, topology.ok, topology.message, fatal=topology.fatal))
        return sorted(found, key=lambda component: component.name)

    def groups(self) -> list[GroupView]:
        term = self._state.term
        if term is None:
            return []
        keys = {*term.state.tracker.keys(), *term.state.queue_status.keys(), *term.state.worker_status.keys()}
        return [self._view(term, key) for key in sorted(keys)]

    def group(self, key: Key) -> GroupView | None:
        term = self._state.term
        if term is None:
            return None
        known = term.state.tracker.status(key) is not None or term.state.queue_status[key] != ObservedQueue()
        return self._view(term, key) if known or term.state.worker_status[key] != ObservedWorkers() else None

    def processes(self) -> list[ProcessView]:
        term = self._state.term
        if term is None or term.workers.pooled is None:
            return []
        found = sorted(term.workers.pooled.driver.processes.values(), key=lambda process: process.instance.slot)
        return [self._process(process) for process in found]

    def _process(self, process: Process) -> ProcessView:
        state = process.state
        memory = ProcessMemory() if state is None else state.memory
        living = [worker for worker in process.assignments() if process.runs(worker.worker_id)]
        return ProcessView(
            worker_id=process.worker_id,
            external_id=process.instance.external_id,
            slot=process.instance.slot,
            state=_process_status(process),
            keys=tuple(sorted(worker.key for worker in living)),
            in_flight=sum(worker.in_flight for worker in living),
            heap_used=memory.heap_used,
            heap_max=memory.heap_max,
            memory=memory.pss,
            requests=0 if state is None else state.requests,
            started_at=process.instance.started_at,
            last_report_at=None if state is None else self._wall(process.heard_at),
            retiring="its settings have changed" if process.is_outdated else process.retiring,
            alone=process.alone,
        )

    def waiting(self) -> list[WaitingView]:
        term = self._state.term
        return [] if term is None else self._waiting(term.state.backlog.waiting())

    def retrying(self) -> Mapping[int, int]:
        term = self._state.term
        return {} if term is None else term.routing.routes.retrying

    def _waiting(self, classes: Mapping[int | None, Waiting]) -> list[WaitingView]:
        """The most urgent class first."""
        now = self._clock.monotonic()
        return [
            WaitingView(priority, classes[priority].requests, classes[priority].age(now))
            for priority in (*PRIORITIES, None)
            if priority in classes
        ]

    # --- actions

    async def _leading(self) -> Term:
        """The present term. Raises `LeadershipLostError`, with the leader's address where it is known."""
        if self._state.term is not None:
            return self._state.term
        leader = await self.leader()
        if leader is None:
            raise LeadershipLostError("No daemon is known to lead the pool at the moment.")
        raise LeadershipLostError("This daemon is on standby.", leader=leader)

    async def start_group(self, key: Key) -> None:
        term = await self._leading()
        term.state.tracker.require_worker_group(key)
        term.workers.loop.retry(key)

    async def stop_group(self, key: Key) -> None:
        tracker = (await self._leading()).state.tracker
        if tracker.is_pinned(key):
            raise PoolConflictError(f"The group {key!r} is pinned: unpin it first.")
        if tracker.status(key) is not None and not tracker.retire(key):
            raise PoolConflictError(f"A request for {key!r} is on its way to the queue: try again in a moment.")

    async def pin(self, key: Key) -> None:
        await self._leading()
        await self._pins.add(key)
        (await self._leading()).state.tracker.pin(key)  # another term may have begun, which had read the pins before

    async def unpin(self, key: Key) -> None:
        await self._leading()
        await self._pins.remove(key)
        (await self._leading()).state.tracker.unpin(key)

    async def logs(self, key: Key, *, lines: int) -> dict[str, tuple[str, ...]]:
        instances = (await self._leading()).state.worker_status[key].instances
        return {
            instance.worker_id: await self._driver.logs(instance.instance_id, lines=lines) for instance in instances
        }

    async def current_manifest(self, kind: ManifestKind) -> KeptManifest | None:
        return await (await self._leading()).routing.manifests[kind].current()

    async def manifests(self, kind: ManifestKind) -> list[KeptManifest]:
        return await (await self._leading()).routing.manifests[kind].history()

    async def change_manifest(
        self, kind: ManifestKind, text: str, *, author: str, expected: int | None = None
    ) -> ManifestChange:
        return await (await self._leading()).routing.manifests[kind].change_text(text, author=author, expected=expected)

    async def restore_manifest(
        self, kind: ManifestKind, version: int, *, author: str, expected: int | None = None
    ) -> ManifestChange:
        return await (await self._leading()).routing.manifests[kind].restore(version, author=author, expected=expected)

    async def clear_manifest(self, kind: ManifestKind, *, author: str, expected: int | None = None) -> ManifestChange:
        return await (await self._leading()).routing.manifests[kind].clear(author=author, expected=expected)

    async def explain(self, arrival: Arrival) -> Explanation:
        term = await self._leading()
        routing, splitter = term.routing.routes, term.routing.splitter.splitter
        routing.require_managed()
        return explain(
            arrival,
            routing.table,
            splitter=splitter,
            names=self._names,
            limits=routing.ttl_limits,
            retrying=routing.retrying,
        )

    async def poison(self, query: PoisonQuery) -> PoisonPage:
        return await (await self._leading()).processors.poison.page(query)

    async def poison_entry(self, entry: str) -> PoisonRecord:
        return await (await self._leading()).processors.poison.entry(entry)

    async def replay_poison(self, entries: Sequence[str]) -> PoisonOutcome:
        return await (await self._leading()).processors.poison.replay(entries)

    async def drop_poison(self, entries: Sequence[str]) -> PoisonOutcome:
        return await (await self._leading()).processors.poison.drop(entries)

    # --- one group

    def _view(self, term: Term, key: Key) -> GroupView:
        record = term.state.tracker.record(key)
        queue, workers = term.state.queue_status[key], term.state.worker_status[key]
        transition, due = _next_transition(term, key)
        return GroupView(
            key=key,
            state=record.status if record is not None else GroupStatus.STOPPING,
            generation=term.state.tracker.generation_of(key),
            queue=QueueView(self._names.request_queue(key), queue.exists, queue.is_bound),
            workers=self._workers(term, key, workers),
            pinned=term.state.tracker.is_pinned(key),
            last_activity_at=None if record is None else self._wall(record.last_activity),
            next_transition=transition,
            next_transition_at=None if due is None else self._wall(due),
            reason=_reason(term, key, queue, workers),
            waiting=tuple(self._waiting(term.state.backlog.of_group(key))),
        )

    def _wall(self, monotonic: float) -> float:
        return self._clock.time() + monotonic - self._clock.monotonic()

    def _workers(self, term: Term, key: Key, facts: ObservedWorkers) -> tuple[WorkerView, ...]:
        by_id: dict[str, Instance] = {instance.worker_id: instance for instance in facts.instances}
        reported = {worker.worker_id for worker in term.state.worker_reports.of_key(key)}
        # A worker that has started replicas is shown by their reports.
        listed = [worker_id for worker_id in by_id if not term.state.worker_reports.replicas(worker_id)]
        views = []
        for worker_id in [*listed, *sorted(reported - by_id.keys())]:
            instance, report = by_id.get(started_as(worker_id)), term.state.worker_reports[worker_id]
            views.append(
                WorkerView(
                    worker_id=worker_id,
                    key=key,
                    external_id=instance.external_id if instance else worker_id,
                    state=_worker_state(instance, report.state if report else None),
                    slot=instance.slot if instance else 0,
                    in_flight=report.in_flight if report else 0,
                    started_at=instance.started_at if instance else None,
                    last_report_at=report.at if report else None,
                    process=None if instance is None else _process_of(instance),
                    metadata={"driver": self._driver.name},
                    cold_start=report.cold_start if report else {},
                )
            )
        return tuple(views)


def _process_of(instance: Instance) -> str | None:
    """The process that the worker shares with others; None if it has one of its own."""
    found = split_id(instance.instance_id)
    return None if found is None else found[0]


def _process_status(process: Process) -> ProcessStatus:
    if process.is_gone:
        return ProcessStatus.ENDED
    if not process.takes_workers:
        return ProcessStatus.RETIRING
    if not process.is_ready:
        return ProcessStatus.STARTING
    return ProcessStatus.READY if process.load else ProcessStatus.SPARE


def _worker_state(instance: Instance | None, reported: WorkerState | None) -> WorkerState:
    """The driver's report of an end takes precedence over the worker's own last report."""
    if instance is not None and instance.state is not InstanceState.RUNNING:
        return WorkerState.STOPPING if instance.state is InstanceState.STOPPING else WorkerState.FAILED
    return reported or WorkerState.STARTING


def _next_transition(term: Term, key: Key) -> tuple[str | None, float | None]:
    record = term.state.tracker.record(key)
    if record is None or term.state.tracker.is_pinned(key) or term.state.tracker.is_held(key):
        return None, None
    if record.status is GroupStatus.ACTIVE:
        return GroupStatus.UNBOUND.value, record.due_at
    return GroupStatus.STOPPING.value, record.due_at


def _reason(term: Term, key: Key, queue: ObservedQueue, workers: ObservedWorkers) -> str:
    """Why the group is where it is, in a sentence; the most pressing fact first."""
    tracker = term.state.tracker
    status = tracker.status(key)
    if queue.fault is not None:
        return str(queue.fault)
    if workers.failure is not None:
        return f"its workers cannot be started: {workers.failure.reason}"
    if workers.waiting_for is not None:
        return f"it waits for {workers.waiting_for}"
    if tracker.is_pinned(key):
        return "it is pinned"
    if tracker.is_held(key):
        return "a request for it is on its way to its queue"
    if status is GroupStatus.ACTIVE:
        return "it was used within unbind_delay"
    if tracker.is_retired(key):
        return "it is to end; its workers stop once the requests in its queue are done"
    if status is GroupStatus.UNBOUND:
        return "it was not used for unbind_delay; its workers stop once its queue is proven empty"
    if not workers.is_empty:
        return "it is not wanted any more, its workers are ending"
    return "it is not wanted any more, its queue is deleted once it is proven empty"
