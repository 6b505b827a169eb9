"""A `PoolInspector` in memory, for tests of the HTTP API."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from osrdyne.aio.tasks import off_loop
from osrdyne.auth.audit import AuditPage, AuditQuery, AuditRecord
from osrdyne.auth.audit import page_of as records_page
from osrdyne.config.models import PriceSettings
from osrdyne.errors import NoSuchQueueError, OsrdyneError, PoolConflictError, VersionConflictError
from osrdyne.ingress.acceptance import TtlLimits
from osrdyne.ingress.circuits.configuration import load_circuits_json
from osrdyne.ingress.circuits.state import CircuitState
from osrdyne.ingress.explain import Explanation, explain
from osrdyne.ingress.policies.lifetimes import CreatedQueue, EndReason
from osrdyne.ingress.policies.manifest import KeyPolicy, load_policies_json, load_proposal
from osrdyne.ingress.policies.policy import Bounds
from osrdyne.ingress.policies.table import FoundPolicy, PolicyTable, without_capacity
from osrdyne.ingress.profiles import load_profiles_json
from osrdyne.ingress.quotas.document import load_quotas_json
from osrdyne.ingress.quotas.quotas import Quotas, Usage
from osrdyne.ingress.quotas.window import Moment
from osrdyne.ingress.requests import Arrival
from osrdyne.ingress.routes.manifest import Manifest, load_manifest_json
from osrdyne.ingress.routes.table import RouteTable
from osrdyne.ingress.splitter.manifest import load_splitter_json
from osrdyne.ingress.splitter.rules import Splitter
from osrdyne.pool.routing.circuits import CircuitView
from osrdyne.pool.routing.manifest_store import Document, KeptManifest, ManifestChange, ManifestKind
from osrdyne.pool.routing.routes import RouteChange
from osrdyne.pool.state.groups.transitions import GroupStatus
from osrdyne.pool.state.queues.created_queues import policy_of_record
from osrdyne.pool.state.queues.lag import Lags
from osrdyne.pool.state.workers.worker_reports import WorkerState
from osrdyne.pool.views import (
    ComponentView,
    GroupView,
    IsVisible,
    LeadershipView,
    PoisonPage,
    PoisonQuery,
    ProcessView,
    QueuePage,
    QueueView,
    RegisteredQueue,
    ReloadView,
    WaitingView,
    WorkerView,
)
from osrdyne.processors.poison.entries import Cursor, cursor_of, finding, matches, page_of, resolve
from osrdyne.protocol.control import Generation
from osrdyne.protocol.names import Key, PoolNames, WorkerId
from osrdyne.protocol.poison import PoisonOutcome, PoisonRecord, WorkerDeath
from osrdyne.telemetry.last_values.query import LastValuePage
from osrdyne.telemetry.last_values.values import Counts, LastValue
from osrdyne.telemetry.status import LogStatus

_LOADERS: Mapping[ManifestKind, Callable[[str], Document]] = {
    ManifestKind.ROUTES: load_manifest_json,
    ManifestKind.SPLITTER: load_splitter_json,
    ManifestKind.PROFILES: load_profiles_json,
    ManifestKind.POLICIES: load_policies_json,
    ManifestKind.QUOTA: load_quotas_json,
    ManifestKind.CIRCUITS: load_circuits_json,
}


@dataclass
class FakeInspector:
    """A pool with these views. `failure`: the error that the asynchronous methods raise."""

    pool: str = "fake"
    leading: bool = True
    leader_address: str | None = "http://leader:4242"
    failure: OsrdyneError | None = None
    prices: Mapping[str, float] = field(default_factory=lambda: PriceSettings().by_tier())
    component_views: list[ComponentView] = field(default_factory=lambda: [ComponentView("broker", True, "connected")])
    group_views: dict[Key, GroupView] = field(default_factory=dict)
    queue_views: dict[Key, RegisteredQueue] = field(default_factory=dict)
    process_views: list[ProcessView] = field(default_factory=list)
    waiting_views: list[WaitingView] = field(default_factory=list)
    retrying_requests: dict[int, int] = field(default_factory=dict)
    group_lags: Lags = field(default_factory=Lags)
    log_status: LogStatus | None = None
    newest: list[LastValue] = field(default_factory=list)
    """Last values, ordered by series."""
    last_value_counts: Counts | None = None
    reloads: list[ReloadView] = field(default_factory=list)
    log_lines: dict[Key, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    ended_workers: dict[Key, list[WorkerDeath]] = field(default_factory=dict)
    process_lines: dict[WorkerId, tuple[str, ...]] = field(default_factory=dict)
    poison_views: list[PoisonRecord] = field(default_factory=list)
    replayed: list[PoisonRecord] = field(default_factory=list)
    tls_keys: set[Key] = field(default_factory=set)
    """Keys whose policy demands TLS."""
    circuit_views: list[CircuitView] = field(default_factory=list)
    versions: defaultdict[ManifestKind, list[KeptManifest]] = field(default_factory=lambda: defaultdict(list))
    """The versions of each kind of manifest, oldest first."""
    records: list[AuditRecord] = field(default_factory=list)
    stores_records: bool = True

    def leadership(self) -> LeadershipView:
        detail = "leads the pool" if self.leading else "stands by: another daemon leads"
        return LeadershipView(self.leading, 7 if self.leading else None, 1000.0 if self.leading else None, detail)

    async def leader(self) -> str | None:
        return self.leader_address

    def components(self) -> list[ComponentView]:
        return list(self.component_views)

    def groups(self) -> list[GroupView]:
        return [self.group_views[key] for key in sorted(self.group_views)] if self.leading else []

    def group(self, key: Key) -> GroupView | None:
        return self.group_views.get(key) if self.leading else None

    def processes(self) -> list[ProcessView]:
        return self.process_views if self.leading else []

    def waiting(self) -> list[WaitingView]:
        return self.waiting_views if self.leading else []

    def lags(self) -> Lags:
        return self.group_lags if self.leading else Lags()

    async def telemetry(self) -> LogStatus | None:
        self._fail()
        return self.log_status

    async def last_values(self, key: Key, *, series: str | None, after: str | None, limit: int) -> LastValuePage:
        self._fail()
        found = [
            one
            for one in self.newest
            if one.key == key and series in {None, one.series} and (after is None or one.series > after)
        ]
        return LastValuePage(tuple(found[:limit]), found[limit - 1].series if len(found) > limit else None)

    async def last_value_totals(self) -> Counts | None:
        return self.last_value_counts

    def retrying(self) -> Mapping[int, int]:
        return self.retrying_requests if self.leading else {}

    async def start_group(self, key: Key) -> None:
        self._fail()
        self.group_views.setdefault(key, group_view(key, pool=self.pool))

    async def stop_group(self, key: Key) -> bool:
        self._fail()
        view = self.group_views.get(key)
        if view is not None and view.pinned:
            raise PoolConflictError("The group is pinned; unpin it first.")
        if view is None:
            return False
        self.group_views[key] = replace(view, state=GroupStatus.STOPPING)
        return True

    async def pin(self, key: Key) -> None:
        await self.start_group(key)
        self.group_views[key] = replace(self.group_views[key], pinned=True)

    async def unpin(self, key: Key) -> None:
        self._fail()
        if key in self.group_views:
            self.group_views[key] = replace(self.group_views[key], pinned=False)

    async def reload_group(self, key: Key, *, timeout: float) -> list[ReloadView]:
        self._fail()
        return self.reloads

    async def logs(self, key: Key, *, lines: int) -> dict[str, tuple[str, ...]]:
        self._fail()
        return {worker: text[-lines:] for worker, text in self.log_lines.get(key, {}).items()}

    async def previous_logs(self, key: Key, *, lines: int) -> list[WorkerDeath]:
        self._fail()
        return [replace(one, log_lines=one.log_lines[-lines:]) for one in self.ended_workers.get(key, [])]

    async def process_logs(self, worker_id: WorkerId, *, lines: int) -> tuple[str, ...]:
        self._fail()
        return self.process_lines.get(worker_id, ())[-lines:]

    async def current_manifest(self, kind: ManifestKind) -> KeptManifest | None:
        self._fail()
        return next(iter(self.versions[kind][-1:]), None)

    async def manifests(self, kind: ManifestKind) -> list[KeptManifest]:
        self._fail()
        return self.versions[kind][::-1]

    async def change_manifest(
        self, kind: ManifestKind, text: str, *, author: str, expected: int | None = None
    ) -> ManifestChange:
        self._fail()
        manifest = await off_loop(len(text), _LOADERS[kind], text)
        kept = self._keep(kind, json.dumps(manifest.document()), author, expected, size=manifest.size)
        added = tuple(sorted(manifest.priorities)) if isinstance(manifest, Manifest) else ()
        return RouteChange(kept, manifest.warnings, added=added)

    async def restore_manifest(
        self, kind: ManifestKind, version: int, *, author: str, expected: int | None = None
    ) -> ManifestChange:
        self._fail()
        if version > len(self.versions[kind]):
            raise PoolConflictError("There is no such version.")
        return RouteChange(self._keep(kind, self.versions[kind][version - 1].manifest, author, expected))

    async def clear_manifest(self, kind: ManifestKind, *, author: str, expected: int | None = None) -> ManifestChange:
        self._fail()
        return RouteChange(self._keep(kind, None, author, expected))

    def _keep(
        self, kind: ManifestKind, text: str | None, author: str, expected: int | None, *, size: int | None = None
    ) -> KeptManifest:
        versions = self.versions[kind]
        if expected is not None and expected != len(versions):
            raise VersionConflictError("Another version is active.", version=len(versions))
        kept = KeptManifest.of(len(versions) + 1, author, 1000.0, text, size=size)
        versions.append(kept)
        return kept

    def requires_tls(self, key: Key) -> bool:
        return key in self.tls_keys

    async def circuits(self) -> list[CircuitView]:
        self._fail()
        return self.circuit_views

    async def close_circuits(self, circuit: str | None, *, author: str) -> list[CircuitView]:
        self._fail()
        found = [one for one in self.circuit_views if circuit in {None, one.hash}]
        self.circuit_views = [
            replace(one, status=CircuitState.CLOSED, fail_ratio=0, successes=0, failures=0) if one in found else one
            for one in self.circuit_views
        ]
        return [one for one in found if one.status is not CircuitState.CLOSED]

    async def effective_policy(self, key: Key) -> FoundPolicy | None:
        self._fail()
        kept = self.versions[ManifestKind.POLICIES][-1:]
        if not kept or kept[0].manifest is None:
            return None
        now = datetime.fromtimestamp(1000.0, UTC)
        bounds = Bounds(max_message_bytes=16 * 2**20, delivery_limit=5)
        return PolicyTable(load_policies_json(kept[0].manifest), bounds=bounds, now=now).effective(key, now=now)

    def quota_usage(self) -> Usage | None:
        kept = self.versions[ManifestKind.QUOTA][-1:]
        if not kept or kept[0].manifest is None:
            return None
        now = Moment(1000.0, 1000.0)
        return Quotas(load_quotas_json(kept[0].manifest), now).usage(now)

    async def queues(self, *, after: Key | None, limit: int, is_visible: IsVisible) -> QueuePage:
        self._fail()
        keys = [key for key in sorted(self.queue_views) if after is None or key > after]
        found = [self.queue_views[key] for key in keys if is_visible(key, self.queue_views[key].policy)]
        return QueuePage(tuple(found[:limit]), found[limit - 1].key if len(found) > limit else None)

    async def queue(self, key: Key) -> RegisteredQueue:
        self._fail()
        if key not in self.queue_views:
            raise NoSuchQueueError("This key has no queue, and none was created for it.")
        return self.queue_views[key]

    async def create_queue(self, key: Key, proposal: str, *, author: str) -> RegisteredQueue:
        self._fail()
        if key in self.queue_views:
            raise PoolConflictError("A queue was created for this key already.")
        return self._register(key, load_proposal(proposal), author)

    async def renew_queue(self, key: Key, proposal: str | None, *, author: str) -> RegisteredQueue:
        record = (await self.queue(key)).record
        text = json.dumps({} if record is None else dict(record.proposal)) if proposal is None else proposal
        return self._register(key, load_proposal(text), author)

    async def remove_queue(self, key: Key, *, author: str) -> RegisteredQueue:
        found = await self.queue(key)
        record = None if found.record is None else found.record.ending(EndReason.DELETED)
        self.queue_views[key] = replace(found, record=record)
        return self.queue_views[key]

    def _register(self, key: Key, proposal: KeyPolicy, author: str) -> RegisteredQueue:
        bounds = Bounds(max_message_bytes=16 * 2**20, delivery_limit=5)
        known = self.queue_views.get(key)
        returned = None if known is None or known.policy is None else known.policy.policy
        now = datetime.fromtimestamp(1000.0, UTC)
        proposal = without_capacity(proposal, bounds=bounds, now=now, returned=returned)
        record = CreatedQueue(key, proposal.document(), author, 1000.0, 1000.0, 1000.0)
        found = policy_of_record(record, bounds)
        record = replace(record, expires_at=found.policy.expiration_instant.timestamp())
        queue = str(PoolNames(self.pool).request_queue(key))
        self.queue_views[key] = RegisteredQueue(key, queue, exists=False, record=record, policy=found)
        return self.queue_views[key]

    async def explain(self, arrival: Arrival) -> Explanation:
        self._fail()
        routes, rules = (self.versions[kind][-1:] for kind in (ManifestKind.ROUTES, ManifestKind.SPLITTER))
        table = RouteTable(load_manifest_json(routes[0].manifest)) if routes and routes[0].manifest else None
        splitter = Splitter(load_splitter_json(rules[0].manifest).rules) if rules and rules[0].manifest else None
        return explain(arrival, table, splitter=splitter, names=PoolNames(self.pool), limits=TtlLimits(600.0, 604800.0))

    async def poison(self, query: PoisonQuery) -> PoisonPage:
        self._fail()
        after = None if query.after is None else Cursor.parse(query.after)
        found = sorted((view for view in self.poison_views if matches(view, query, now=2000.0)), key=cursor_of)
        chosen = page_of(found, after=after, limit=query.limit, with_bodies=query.bodies)
        rest = chosen and chosen[-1] != found[-1]
        entries = chosen if query.bodies else [replace(view, body=None) for view in chosen]
        return PoisonPage(tuple(entries), len(found), str(cursor_of(chosen[-1])) if rest else None)

    async def poison_entry(self, entry: str) -> PoisonRecord:
        self._fail()
        return resolve(entry, self.poison_views)

    async def replay_poison(self, entries: Sequence[str]) -> PoisonOutcome:
        return self._take_out(entries, self.replayed)

    async def drop_poison(self, entries: Sequence[str]) -> PoisonOutcome:
        return self._take_out(entries, [])

    def _take_out(self, entries: Sequence[str], taken: list[PoisonRecord]) -> PoisonOutcome:
        self._fail()
        found = [view for view in self.poison_views if view.id in entries]
        self.poison_views = [view for view in self.poison_views if view not in found]
        taken += found
        done = tuple(view.id for view in found)
        return PoisonOutcome(done, tuple(entry for entry in entries if entry not in done))

    async def record_change(self, record: AuditRecord) -> bool:
        if self.stores_records:
            self.records.append(record)
        return self.stores_records

    async def audit(self, query: AuditQuery) -> AuditPage:
        self._fail()
        return records_page(self.records, query)

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure


def group_view(key: Key, *workers: WorkerView, pool: str = "fake") -> GroupView:
    """An active group with the given workers."""
    return GroupView(
        key=key,
        state=GroupStatus.ACTIVE,
        generation=Generation(7, 3),
        queue=QueueView(PoolNames(pool).request_queue(key), exists=True, bound=True),
        workers=workers,
        pinned=False,
        last_activity_at=1010.0,
        next_transition="unbound",
        next_transition_at=1610.0,
        reason="active: a request arrived",
    )


def worker_view(key: Key, worker_id: str = "w1", state: WorkerState = WorkerState.READY) -> WorkerView:
    """A worker of a group."""
    return WorkerView(worker_id=worker_id, key=key, external_id=f"pid-{worker_id}", state=state, started_at=1001.0)


def poison_view(name: str, **changes: Any) -> PoisonRecord:
    """An entry that ended two workers; the second also ran another request."""
    deaths = (
        WorkerDeath("w1", "exit code 9", None, 1001.0, ("loading", "out of memory"), 0),
        WorkerDeath("w2", "signal SIGKILL", "the JVM is gone", 1002.0, (), 1),
    )
    view = PoisonRecord(
        id=name, key="k", path="/sql", correlation_id="c1", reply_to="replies", message_id=None, app_id=None,
        content_type="application/json", reason="delivery_limit", deliveries=6, deaths=deaths,
        finding=finding(6, deaths), replays=0, first_at=1000.0, last_at=1010.0, size_bytes=8,
        headers={"x-rpc-path": "/sql"}, body=b'{"a": 1}',
    )  # fmt: skip
    return replace(view, **changes)
