"""The daemon's state for the API: the state of the present term as values of `pool.views`, and the actions of the API.

Reads and forwards; it decides nothing. Built by the daemon, used by the HTTP API.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import secrets
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace

from osrdyne.aio.clock import Backoff, Clock
from osrdyne.aio.tasks import SMALL, off_loop
from osrdyne.amqp import ALARM
from osrdyne.auth.audit import AuditPage, AuditQuery, AuditRecord
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.session import LeaderSession
from osrdyne.daemon.leader_address import LeaderAddress
from osrdyne.daemon.term import Term
from osrdyne.drivers.base import Driver, Instance, InstanceState
from osrdyne.drivers.pooled.driver import PooledDriver
from osrdyne.drivers.pooled.process import Process, split_id
from osrdyne.errors import BrokerError, LeadershipLostError, NoSuchQueueError, PoolConflictError
from osrdyne.ingress.explain import Explanation, explain, explain_routes, preview_split
from osrdyne.ingress.policies.lifetimes import EndReason
from osrdyne.ingress.policies.manifest import load_proposal
from osrdyne.ingress.policies.policy import TransportProtection
from osrdyne.ingress.policies.table import FoundPolicy
from osrdyne.ingress.quotas.quotas import Usage
from osrdyne.ingress.requests import Arrival
from osrdyne.pool.queues.delivery_limits import MAX_POLICIES
from osrdyne.pool.routing.circuits import CircuitView
from osrdyne.pool.routing.manifest_store import KeptManifest, ManifestChange, ManifestKind
from osrdyne.pool.state.groups.pins import PinStore
from osrdyne.pool.state.groups.transitions import GroupStatus
from osrdyne.pool.state.observed import ObservedQueue, ObservedWorkers
from osrdyne.pool.state.queues.backlog import Waiting
from osrdyne.pool.state.queues.lag import Lags
from osrdyne.pool.state.workers.worker_reports import WorkerState
from osrdyne.pool.views import (
    ComponentView,
    GroupView,
    IsVisible,
    LeadershipView,
    PoisonPage,
    PoisonQuery,
    ProcessStatus,
    ProcessView,
    QueuePage,
    QueueView,
    RegisteredQueue,
    ReloadOutcome,
    ReloadView,
    WaitingView,
    WorkerView,
)
from osrdyne.protocol.activity import PROCESS_START_PARTS
from osrdyne.protocol.names import PRIORITIES, Key, PoolNames, WorkerId, started_as
from osrdyne.protocol.poison import PoisonOutcome, PoisonRecord, WorkerDeath
from osrdyne.protocol.pooled import ProcessMemory
from osrdyne.telemetry.last_values.query import LastValuePage, LastValues
from osrdyne.telemetry.last_values.values import Counts
from osrdyne.telemetry.status import LogStatus

MAX_RELOADS = 16  # Reloads that are waited for at the same time.
RELOAD_POLL = Backoff(initial=0.1, maximum=1.0)  # Between two checks of the workers' reports.
RELOAD_INTERVAL = 2.0  # Seconds until workers are asked again for the outcome of a reload.
MAX_EXAMINED = 1_000  # Keys whose policy one page of the registry compares with the rights of its reader.
EXAMINED_AT_ONCE = 10
FIND_TIMEOUT = 2.0  # Seconds for RabbitMQ to answer with the leader's address.


@dataclass(slots=True)
class DaemonState:
    """The present term, its session or that of a standby, and the health of the components; written only by the
    daemon."""

    term: Term | None = None
    session: LeaderSession | None = None
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
        prices: Mapping[str, float],
        clock: Clock,
        last_values: LastValues | None = None,
    ) -> None:
        self._names = PoolNames(pool)
        self._state = state
        self._driver = driver
        self._management = management
        self._pins = pins
        self._leader = leader
        self._prices = prices
        self._clock = clock
        self._last_values = last_values
        self._reloads = 0

    @property
    def pool(self) -> str:
        return self._names.pool

    @property
    def prices(self) -> Mapping[str, float]:
        return self._prices

    def leadership(self) -> LeadershipView:
        term = self._state.term
        if term is None:
            waiting = self._state.components.get("leadership")
            return LeadershipView(False, None, None, waiting.detail if waiting else "starting")
        return LeadershipView(True, term.state.tracker.generation.term, term.since, "leading")

    async def leader(self) -> str | None:
        own = self._leader.own()
        if self._state.term is not None:
            return own
        announced = None
        with suppress(BrokerError, TimeoutError):  # a health check must not wait for long
            async with asyncio.timeout(FIND_TIMEOUT):
                announced = await self._leader.find()
        return None if announced == own else announced

    def _is_blocked(self) -> bool:
        """Whether an alarm of RabbitMQ keeps this daemon, leader or standby, from publishing."""
        if self._state.term is not None:
            return self._state.term.is_blocked
        return self._state.session is not None and self._state.session.is_blocked

    def components(self) -> list[ComponentView]:
        found = [*self._state.components.values()]
        if self._is_blocked():
            reason = (
                f"RabbitMQ accepts no messages because of {ALARM}, so requests wait; `osrdyne doctor` names its node"
            )
            # A daemon that is connected works again by itself, and to restart it would not help.
            fatal = self._state.term is None and "broker" not in self._state.components
            found.append(ComponentView("alarm", False, reason, fatal=fatal))
        if self._state.term is not None and (off := self._state.term.routing.routes.retries_off):
            reason = " ".join(sorted(set(off.values())))
            found.append(
                ComponentView("retries", False, f"off for routes {', '.join(sorted(off))}. {reason}", fatal=False)
            )
        if self._state.term is not None and (silent := self._state.term.routing.routes.levels.silent):
            keys = ", ".join(sorted({repr(key) for key in silent.values()})[:5])
            reason = f"{len(silent)} workers do not report for the priorities of their group, such as those of {keys}"
            found.append(ComponentView("worker priorities", False, reason, fatal=False))
        if self._state.term is not None and (left_out := self._state.term.routing.profiles.left_out):
            reason = f"left out, because they cannot be used with the present settings: {'; '.join(map(str, left_out))}"
            found.append(ComponentView("profiles", False, reason, fatal=False))
        if self._state.term is not None and (left := self._state.term.queues.limits.left_out):
            reason = f"{len(left)} keys have the delivery limit of the pool: at most {MAX_POLICIES} can have their own"
            found.append(ComponentView("delivery limits", False, reason, fatal=False))
        if self._state.term is not None:
            routing, replier = self._state.term.routing, self._state.term.processors.replier
            findings = routing.topology.finding(), routing.log.finding(), routing.log_inspector.finding()
            found += [
                ComponentView(finding.subject, finding.ok, finding.message, fatal=finding.fatal)
                for finding in (*findings, replier.finding(self._state.term.state.worker_reports.waiting_answers()))
                if finding is not None
            ]
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
        driver = term.workers.pooled.driver
        found = sorted(driver.processes.values(), key=lambda process: process.instance.slot)
        return [self._process(driver, process) for process in found]

    def _process(self, driver: PooledDriver, process: Process) -> ProcessView:
        state = process.state
        memory = ProcessMemory() if state is None else state.memory
        settings = driver.settings.get(process.settings_hash)
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
            memory_share=None if memory.limit is None else memory.limit.share,
            requests=0 if state is None else state.requests,
            started_at=process.instance.started_at,
            last_report_at=None if state is None else self._wall(process.heard_at),
            retiring="its settings have changed" if process.is_outdated else process.retiring,
            alone=process.alone,
            profile=None if settings is None else settings.profile,
            cold_start={} if state is None else _known_parts(state.cold_start),
            executor_seconds=None if state is None else state.executor_seconds,
        )

    async def process_logs(self, worker_id: WorkerId, *, lines: int) -> tuple[str, ...]:
        pooled = (await self._leading()).workers.pooled
        return () if pooled is None else await pooled.driver.process_logs(worker_id, lines=lines)

    def waiting(self) -> list[WaitingView]:
        term = self._state.term
        return [] if term is None else self._waiting(term.state.backlog.waiting())

    def lags(self) -> Lags:
        term = self._state.term
        return Lags() if term is None else term.groups.lags.current()

    async def telemetry(self) -> LogStatus | None:
        term = await self._leading()
        log = term.routing.log.log
        if log.name is None:
            return None
        status, scheduler = await term.routing.log_inspector.status(log.name, log.partitions), term.routing.scheduler
        return status if scheduler is None else replace(status, tables=scheduler.status())

    async def last_values(self, key: Key, *, series: str | None, after: str | None, limit: int) -> LastValuePage:
        if self._last_values is None:
            raise PoolConflictError("This daemon has no last values.")
        return await self._last_values.page(key, series=series, after=after, limit=limit)

    async def last_value_totals(self) -> Counts | None:
        return None if self._last_values is None else await self._last_values.totals()

    def retrying(self) -> Mapping[int, int]:
        term = self._state.term
        return {} if term is None else term.routing.routes.retrying

    def _waiting(self, levels: Mapping[int | None, Waiting]) -> list[WaitingView]:
        """The most urgent level first."""
        now = self._clock.monotonic()
        return [
            WaitingView(priority, levels[priority].requests, levels[priority].age(now))
            for priority in (*PRIORITIES, None)
            if priority in levels
        ]

    # --- actions

    async def _leading(self) -> Term:
        """The present term. Raises `LeadershipLostError`, with the leader's address if it is known."""
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

    async def stop_group(self, key: Key) -> bool:
        tracker = (await self._leading()).state.tracker
        if tracker.is_pinned(key):
            raise PoolConflictError(f"The group {key!r} is pinned: unpin it first.")
        if tracker.status(key) is None:
            return False
        if not tracker.retire(key):
            raise PoolConflictError(f"A request for {key!r} is on its way to the queue: try again in a moment.")
        return True

    async def pin(self, key: Key) -> None:
        await self._leading()
        await self._pins.add(key)
        (await self._leading()).state.tracker.pin(key)  # another term may have begun, which had read the pins before

    async def unpin(self, key: Key) -> None:
        await self._leading()
        await self._pins.remove(key)
        (await self._leading()).state.tracker.unpin(key)

    async def reload_group(self, key: Key, *, timeout: float) -> list[ReloadView]:
        # The leader may lose the token, or die, while it waits: the caller gets an error and may try again, and workers
        # that have received the command reload anyway.
        if self._reloads >= MAX_RELOADS:
            raise PoolConflictError(
                f"{MAX_RELOADS} reloads are waited for already: try again when one of them has ended."
            )
        self._reloads += 1
        try:
            return await self._reload(key, timeout=timeout)
        finally:
            self._reloads -= 1

    async def _reload(self, key: Key, *, timeout: float) -> list[ReloadView]:
        term, reload_id = await self._leading(), secrets.token_hex(8)
        asked = sorted(self._living_workers(term, key))
        until, send_at = self._clock.monotonic() + timeout, -math.inf
        checks = 0
        while True:
            outcomes = [self._reload_outcome(term, key, worker_id, reload_id) for worker_id in asked]
            now = self._clock.monotonic()
            if now >= until or not any(one.outcome is ReloadOutcome.UNKNOWN for one in outcomes):
                return outcomes
            if self._state.term is not term:
                raise LeadershipLostError("This daemon lost the leadership while workers reloaded their data.")
            if now >= send_at:
                # Repeated, because control messages and reports may get lost.
                send_at = now + RELOAD_INTERVAL
                await term.workers.control.ask_for_reload(key, reload_id)
            # Most reloads take seconds: a report is noticed at most a second late.
            checks += 1
            await self._clock.sleep(min(RELOAD_POLL.delay(checks), until - now))

    def _living_workers(self, term: Term, key: Key) -> set[str]:
        views = self._workers(term, key, term.state.worker_status[key])
        return {one.worker_id for one in views if one.state not in (WorkerState.STOPPING, WorkerState.FAILED)}

    def _reload_outcome(self, term: Term, key: Key, worker_id: str, reload_id: str) -> ReloadView:
        report = term.state.worker_reports[worker_id]
        reloads = {} if report is None else report.reloads
        if reload_id in reloads:
            error = reloads[reload_id]
            return ReloadView(worker_id, ReloadOutcome.RELOADED if error is None else ReloadOutcome.FAILED, error)
        alive = worker_id in self._living_workers(term, key)
        return ReloadView(worker_id, ReloadOutcome.UNKNOWN if alive else ReloadOutcome.ENDED)

    async def logs(self, key: Key, *, lines: int) -> dict[str, tuple[str, ...]]:
        instances = (await self._leading()).state.worker_status[key].instances
        return {
            instance.worker_id: await self._driver.logs(instance.instance_id, lines=lines) for instance in instances
        }

    async def previous_logs(self, key: Key, *, lines: int) -> list[WorkerDeath]:
        ended = (await self._leading()).state.ended_workers.of_key(key)
        return [replace(one, log_lines=one.log_lines[-lines:]) for one in ended]

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

    def requires_tls(self, key: Key) -> bool:
        found = None if self._state.term is None else self._state.term.routing.policies.of(key)
        return found is not None and found.policy.transport_protection is TransportProtection.ALL_PATHS

    async def circuits(self) -> list[CircuitView]:
        return (await self._leading()).routing.circuits.circuits()

    async def close_circuits(self, circuit: str | None, *, author: str) -> list[CircuitView]:
        return await (await self._leading()).routing.circuits.close(circuit, author=author)

    async def effective_policy(self, key: Key) -> FoundPolicy | None:
        return (await self._leading()).routing.policies.effective(key)

    def quota_usage(self) -> Usage | None:
        term = self._state.term
        return None if term is None else term.routing.quotas.usage()

    async def queues(self, *, after: Key | None, limit: int, is_visible: IsVisible) -> QueuePage:
        term = await self._leading_managed()
        keys = {*(record.key for record in term.state.created_queues.all()), *term.state.queue_status.existing()}
        following = await off_loop(sum(map(len, keys)), _first_keys, keys, after)
        found: list[RegisteredQueue] = []
        seen = after
        for number, key in enumerate(following[:MAX_EXAMINED]):
            if len(found) == limit:
                break
            if number % EXAMINED_AT_ONCE == EXAMINED_AT_ONCE - 1:
                await asyncio.sleep(0)  # matching a key against thousands of patterns takes long
            if is_visible(key, term.routing.policies.of(key)):
                found.append(self._queue(term, key))
            seen = key
        more = bool(following) and seen != following[-1]
        return QueuePage(tuple(found), seen if more else None)

    async def queue(self, key: Key) -> RegisteredQueue:
        term = await self._leading_managed()
        found = self._queue(term, key)
        if found.record is None and not found.exists:
            raise NoSuchQueueError("This key has no queue, and none was created for it.")
        return found

    async def create_queue(self, key: Key, proposal: str, *, author: str) -> RegisteredQueue:
        term = await self._leading_managed()
        proposed = await off_loop(len(proposal), load_proposal, proposal)
        await term.routing.lifetimes.create(key, proposed, author=author)
        return self._queue(term, key)

    async def renew_queue(self, key: Key, proposal: str | None, *, author: str) -> RegisteredQueue:
        term = await self._leading_managed()
        proposed = None if proposal is None else await off_loop(len(proposal), load_proposal, proposal)
        await term.routing.lifetimes.renew(key, proposed, author=author)
        return self._queue(term, key)

    async def remove_queue(self, key: Key, *, author: str) -> RegisteredQueue:
        term = await self._leading_managed()
        await term.routing.lifetimes.remove(key, author=author)
        return self._queue(term, key)

    async def _leading_managed(self) -> Term:
        term = await self._leading()
        term.routing.policies.require_managed()
        return term

    def _queue(self, term: Term, key: Key) -> RegisteredQueue:
        return RegisteredQueue(
            key=key,
            queue=str(self._names.request_queue(key)),
            exists=term.state.queue_status[key].exists,
            record=term.state.created_queues.get(key),
            policy=term.routing.policies.effective(key),
        )

    async def explain(self, arrival: Arrival) -> Explanation:
        term = await self._leading()
        routing, splitter = term.routing.routes, term.routing.splitter.splitter
        routing.require_managed()
        table, split = routing.table, preview_split(arrival, splitter)
        size = 0 if table is None else table.manifest.size * SMALL // 100
        routes = await off_loop(size, explain_routes, arrival, table, split)
        return explain(
            arrival,
            table,
            split=split,
            routes=routes,
            splitter=splitter,
            names=self._names,
            limits=routing.ttl_limits,
            retrying=routing.retrying,
            profile_of=term.state.profiles.describe,
            rate_of=term.state.rates.describe,
            checks=term.processors.checks,
            policy_of=term.routing.policies.of,
            log=term.routing.log.log,
        )

    async def poison(self, query: PoisonQuery) -> PoisonPage:
        return await (await self._leading()).processors.poison.page(query)

    async def poison_entry(self, entry: str) -> PoisonRecord:
        return await (await self._leading()).processors.poison.entry(entry)

    async def replay_poison(self, entries: Sequence[str]) -> PoisonOutcome:
        return await (await self._leading()).processors.poison.replay(entries)

    async def drop_poison(self, entries: Sequence[str]) -> PoisonOutcome:
        return await (await self._leading()).processors.poison.drop(entries)

    async def record_change(self, record: AuditRecord) -> bool:
        term = self._state.term
        return term is not None and await term.processors.audit.write(record)

    async def audit(self, query: AuditQuery) -> AuditPage:
        return await (await self._leading()).processors.audit.page(query)

    # --- one group

    def _view(self, term: Term, key: Key) -> GroupView:
        record = term.state.tracker.record(key)
        queue, workers = term.state.queue_status[key], term.state.worker_status[key]
        transition, due = _next_transition(term, key)
        group = term.state.profiles.of(key)
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
            profile=None if group.profile is None else group.profile.match,
            settings=group.shown(),
            policy=_policy_of(term, key),
        )

    def _wall(self, monotonic: float) -> float:
        return self._clock.time() + monotonic - self._clock.monotonic()

    def _workers(self, term: Term, key: Key, observed: ObservedWorkers) -> tuple[WorkerView, ...]:
        by_id: dict[str, Instance] = {instance.worker_id: instance for instance in observed.instances}
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
                    executor_seconds=report.executor_seconds if report else None,
                    events_per_minute=report.rate.events_per_minute if report and report.rate else None,
                )
            )
        return tuple(views)


def _first_keys(keys: Set[Key], after: Key | None) -> list[Key]:
    """The first keys after a key, in their order: one more than a page examines."""
    return heapq.nsmallest(MAX_EXAMINED + 1, (key for key in keys if after is None or key > after))


def _policy_of(term: Term, key: Key) -> str | None:
    found = term.routing.policies.of(key)
    return None if found is None else found.name


def _process_of(instance: Instance) -> str | None:
    """The process that the worker shares with others; None if it has one of its own."""
    found = split_id(instance.instance_id)
    return None if found is None else found[0]


def _known_parts(cold_start: Mapping[str, int]) -> dict[str, int]:
    return {part: cold_start[part] for part in PROCESS_START_PARTS if part in cold_start}


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
    """A sentence that explains the state of the group: the most urgent cause."""
    tracker = term.state.tracker
    status = tracker.status(key)
    if (record := term.state.created_queues.get(key)) is not None and record.is_ending:
        why = "has expired" if record.reason is EndReason.EXPIRED else "was deleted"
        return f"its queue {why} and is being removed; requests for it are answered gone"
    if queue.fault is not None:
        return str(queue.fault)
    if workers.failure is not None:
        return f"its workers cannot be started: {workers.failure.reason}"
    if term.state.paused.is_paused(key):
        return "a circuit pauses it: its workers take no requests; `osrdyne circuits list` shows why"
    if workers.waiting_for is not None:
        return f"it waits for {workers.waiting_for}"
    reported = next((one.waiting_for for one in term.state.worker_reports.of_key(key) if one.waiting_for), None)
    if reported is not None:
        return f"its worker waits for {reported}"
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
        return "it is not needed any more, its workers are ending"
    return "it is not needed any more, its queue is deleted once it is proven empty"
