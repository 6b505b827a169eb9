"""Views of the pool: frozen values for the HTTP API, the CLI and the metrics, and the interfaces that return them.

The daemon implements `PoolInspector`, and a fake does in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from osrdyne.auth.audit import AuditPage, AuditQuery, AuditRecord
from osrdyne.ingress.explain import Explanation
from osrdyne.ingress.policies.lifetimes import CreatedQueue
from osrdyne.ingress.policies.table import FoundPolicy
from osrdyne.ingress.quotas.quotas import Usage
from osrdyne.ingress.requests import Arrival
from osrdyne.pool.routing.circuits import CircuitView
from osrdyne.pool.routing.manifest_store import KeptManifest, ManifestChange, ManifestKind
from osrdyne.pool.state.groups.transitions import GroupStatus
from osrdyne.pool.state.queues.lag import Lags
from osrdyne.pool.state.workers.worker_reports import WorkerState
from osrdyne.protocol.control import Generation
from osrdyne.protocol.names import Key, WorkerId
from osrdyne.protocol.poison import PoisonOutcome, PoisonRecord, WorkerDeath
from osrdyne.telemetry.last_values.query import LastValuePage
from osrdyne.telemetry.last_values.values import Counts
from osrdyne.telemetry.status import LogStatus


class ReloadOutcome(StrEnum):
    """How a reload of a worker's data ended."""

    RELOADED = "reloaded"
    FAILED = "failed"
    ENDED = "ended"
    """The worker ended meanwhile; its successor loads the data when it starts."""
    UNKNOWN = "unknown"
    """No report within the time limit; the worker may still be loading."""


@dataclass(frozen=True, slots=True)
class ReloadView:
    """The reload of one worker's data; `reason`: why it failed."""

    worker_id: str
    outcome: ReloadOutcome
    reason: str | None = None


class ProcessStatus(StrEnum):
    """The state of a process of pooled workers."""

    STARTING = "starting"
    READY = "ready"
    SPARE = "spare"
    RETIRING = "retiring"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker. Times are seconds since the epoch; `in_flight`: requests that it runs. `process`: the process that it
    shares with workers of other keys, if it does. `cold_start`: milliseconds of each part of its start.
    `executor_seconds`: how long its tasks have run, on one core. `events_per_minute`: the limit that it reports.
    """

    worker_id: str
    key: Key
    external_id: str
    state: WorkerState
    slot: int = 0
    in_flight: int = 0
    started_at: float | None = None
    last_report_at: float | None = None
    process: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    cold_start: Mapping[str, int] = field(default_factory=dict)
    executor_seconds: float | None = None
    events_per_minute: float | None = None


@dataclass(frozen=True, slots=True)
class ProcessView:
    """One process of pooled workers. Memory in bytes, None if it is unknown: `heap_used` and `heap_max` of the JVM,
    `memory` as the proportional set size of the process with its JVM. `memory_share`: used share of the memory of its
    host or cgroup. Times are seconds since the epoch.

    `state`: `starting`, `ready`, `spare` (ready and without workers), `retiring` (its workers are being replaced) or
    `ended`. `requests`: served since its start. `alone`: the only key that it takes. `profile`: the pattern of the
    first profile with its settings; None: they are those of the pool, or no longer those of a profile. `cold_start`:
    milliseconds of each part of its start. `executor_seconds`: how long tasks of all its keys have run, on one core.
    """

    worker_id: str
    external_id: str
    slot: int
    state: ProcessStatus
    keys: tuple[Key, ...] = ()
    in_flight: int = 0
    heap_used: int | None = None
    heap_max: int | None = None
    memory: int | None = None
    memory_share: float | None = None
    requests: int = 0
    started_at: float | None = None
    last_report_at: float | None = None
    retiring: str | None = None
    alone: Key | None = None
    profile: str | None = None
    cold_start: Mapping[str, int] = field(default_factory=dict)
    executor_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class QueueView:
    """The request queue of a group as observed in this term."""

    name: str
    exists: bool
    bound: bool


@dataclass(frozen=True, slots=True)
class WaitingView:
    """Waiting requests of one priority level (None: the default level). `oldest_age` in seconds, None if no request
    waits or the age is unknown."""

    priority: int | None
    requests: int
    oldest_age: float | None


@dataclass(frozen=True, slots=True)
class GroupView:
    """One worker group. `next_transition` names the next state, `next_transition_at` its time (seconds since the
    epoch); `reason` is a sentence that explains the state of the group and its next change. `waiting`: by level, as of
    the latest resync. `profile`: the pattern of the profile that matches the key; None: the settings of the pool apply.
    `settings`: the effective values of what a profile may change, without secrets. `policy`: the queue policy that acts
    on the key; None if none does."""

    key: Key
    state: GroupStatus
    generation: Generation
    queue: QueueView
    workers: tuple[WorkerView, ...]
    pinned: bool
    last_activity_at: float | None
    next_transition: str | None
    next_transition_at: float | None
    reason: str
    waiting: tuple[WaitingView, ...] = ()
    profile: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    policy: str | None = None


@dataclass(frozen=True, slots=True)
class ComponentView:
    """The health of one component: `broker`, `management`, `leadership`, `driver`, `orphans`, `dead-letters`, …"""

    name: str
    ok: bool
    detail: str
    fatal: bool = True
    """Whether the daemon cannot work while the component is not ok."""


@dataclass(frozen=True, slots=True)
class LeadershipView:
    """Whether this daemon leads its pool, and since when (seconds since the epoch)."""

    leading: bool
    term: int | None
    since: float | None
    detail: str


@dataclass(frozen=True, slots=True)
class PoisonQuery:
    """Which entries to list: of these keys, of this path, older or newer than so many seconds; at most `limit`
    entries after the cursor `after`."""

    keys: frozenset[str] | None = None
    path: str | None = None
    older_than: float | None = None
    newer_than: float | None = None
    after: str | None = None
    limit: int = 100
    bodies: bool = False


@dataclass(frozen=True, slots=True)
class PoisonPage:
    """Entries, oldest first. `total`: number of matching entries. `next`: cursor of the next page, None at the end.
    `complete`: False if the inventory holds more entries than are examined."""

    entries: tuple[PoisonRecord, ...]
    total: int
    next: str | None
    complete: bool = True


class PoisonInspector(Protocol):
    """Access to the poison inventory for the API. Every method raises `LeadershipLostError` while this daemon does
    not lead: only the leader reads the queue."""

    @property
    def pool(self) -> str: ...

    async def poison(self, query: PoisonQuery) -> PoisonPage:
        """List entries of the poison inventory without consuming them."""
        ...

    async def poison_entry(self, entry: str) -> PoisonRecord:
        """One entry with its body, by its id or a unique prefix of it. Raises `PoisonNotFoundError`."""
        ...

    async def replay_poison(self, entries: Sequence[str]) -> PoisonOutcome:
        """Publish the requests again as they were, and remove their entries."""
        ...

    async def drop_poison(self, entries: Sequence[str]) -> PoisonOutcome:
        """Remove entries permanently."""
        ...


class ManifestInspector(Protocol):
    """Access to the manifests of a pool for the API. Every method raises `LeadershipLostError` while this daemon does
    not lead, and for routes and splitters `PoolConflictError` in a direct pool. `expected` is the version that a change
    expects to be active, 0 for none; if another version is active, it raises `VersionConflictError`."""

    @property
    def pool(self) -> str: ...

    async def current_manifest(self, kind: ManifestKind) -> KeptManifest | None:
        """The active version; None if there has never been one."""
        ...

    async def manifests(self, kind: ManifestKind) -> list[KeptManifest]:
        """Every stored version, the newest (the active one) first; empty if there has never been one."""
        ...

    async def change_manifest(
        self, kind: ManifestKind, text: str, *, author: str, expected: int | None = None
    ) -> ManifestChange:
        """Activate the manifest in a text. Raises `InvalidDocumentError` with every error of it."""
        ...

    async def restore_manifest(
        self, kind: ManifestKind, version: int, *, author: str, expected: int | None = None
    ) -> ManifestChange:
        """Activate an earlier version again, as a new version. Raises `PoolConflictError` if it is not stored."""
        ...

    async def clear_manifest(self, kind: ManifestKind, *, author: str, expected: int | None = None) -> ManifestChange:
        """Change to no manifest, as a new version. Raises `PoolConflictError` if there is none."""
        ...

    def requires_tls(self, key: Key) -> bool:
        """Whether the queue policy of the key demands TLS for HTTP; False while this daemon does not lead."""
        ...

    async def effective_policy(self, key: Key) -> FoundPolicy | None:
        """The queue policy of a key as of now; None if none acts on it."""
        ...

    def quota_usage(self) -> Usage | None:
        """What was used of the active quotas; None if there are none, or while not leading."""
        ...

    async def explain(self, arrival: Arrival) -> Explanation:
        """Explain what the active routes and splitter would do with a request."""
        ...


class CircuitInspector(Protocol):
    """Access to the circuits of a pool for the API. Raises `LeadershipLostError` while this daemon does not lead, and
    `PoolConflictError` in a direct pool."""

    @property
    def pool(self) -> str: ...

    async def circuits(self) -> list[CircuitView]:
        """Every circuit, by route and key."""
        ...

    async def close_circuits(self, circuit: str | None, *, author: str) -> list[CircuitView]:
        """Close the circuit with this hash, None for all; returns those that were not closed, as they were."""
        ...


@dataclass(frozen=True, slots=True)
class RegisteredQueue:
    """The queue of a key as the registry lists it. `queue`: its name in RabbitMQ. `record`: of a created queue; None:
    the queue came with a request. `policy`: None if no policy acts on the key."""

    key: Key
    queue: str
    exists: bool
    record: CreatedQueue | None
    policy: FoundPolicy | None


IsVisible = Callable[[Key, FoundPolicy | None], bool]


@dataclass(frozen=True, slots=True)
class QueuePage:
    """A part of the registry. `following`: the key after which the next page begins; None on the last page."""

    queues: tuple[RegisteredQueue, ...]
    following: Key | None


class QueueInspector(Protocol):
    """Access to the queues of keys for the API. Every method raises `LeadershipLostError` while this daemon does not
    lead, and `PoolConflictError` in a direct pool. `proposal`: JSON; it raises `InvalidDocumentError` with every error
    of it."""

    @property
    def pool(self) -> str: ...

    async def queues(self, *, after: Key | None, limit: int, is_visible: IsVisible) -> QueuePage:
        """Created queues and those that exist, ordered by key: those after a key that `is_visible` accepts.

        `is_visible` gets the key and the policy that acts on it. At most `limit` queues, and those of a bounded number
        of keys: a page may be empty although others follow.
        """
        ...

    async def queue(self, key: Key) -> RegisteredQueue:
        """Raises `NoSuchQueueError` if the key has no queue and none was created."""
        ...

    async def create_queue(self, key: Key, proposal: str, *, author: str) -> RegisteredQueue:
        """Create the queue of a key. Raises `PoolConflictError` if one was created already."""
        ...

    async def renew_queue(self, key: Key, proposal: str | None, *, author: str) -> RegisteredQueue:
        """Renew a created queue; None: with its present proposal. Raises `NoSuchQueueError`."""
        ...

    async def remove_queue(self, key: Key, *, author: str) -> RegisteredQueue:
        """Begin to remove a created queue. Raises `NoSuchQueueError`."""
        ...


class AuditInspector(Protocol):
    """The records of changes for the API."""

    async def record_change(self, record: AuditRecord) -> bool:
        """Store a record. Whether RabbitMQ has confirmed it; false while this daemon does not lead."""
        ...

    async def audit(self, query: AuditQuery) -> AuditPage:
        """Stored records, the newest first. Raises `LeadershipLostError` while this daemon does not lead."""
        ...


class PoolInspector(PoisonInspector, ManifestInspector, CircuitInspector, QueueInspector, AuditInspector, Protocol):
    """What the API needs from the daemon. Every method may be called at any time, also while not leading.

    The asynchronous methods except `leader` and those of last values raise `LeadershipLostError` while this daemon does
    not lead, and `InvalidKeyError` for an invalid key.
    """

    @property
    def pool(self) -> str: ...

    @property
    def prices(self) -> Mapping[str, float]:
        """Prices of a unit and month, by the name of the tier."""
        ...

    def leadership(self) -> LeadershipView: ...

    async def leader(self) -> str | None:
        """The address of the leader's API; None if no leader is known."""
        ...

    def components(self) -> list[ComponentView]: ...

    def groups(self) -> list[GroupView]:
        """All groups, ordered by key; empty while not leading."""
        ...

    def group(self, key: Key) -> GroupView | None: ...

    def processes(self) -> list[ProcessView]:
        """The processes of pooled workers, by slot; empty while not leading, and in a pool of dedicated workers."""
        ...

    def waiting(self) -> list[WaitingView]:
        """Waiting requests by priority level, over all groups; empty while not leading."""
        ...

    def lags(self) -> Lags:
        """The lag of all groups together, and of those in which requests wait; neither while not leading."""
        ...

    async def telemetry(self) -> LogStatus | None:
        """The log of telemetry and the lag of its readers; None for a pool without a log. Raises `BrokerError`, and
        `LeadershipLostError` while not leading."""
        ...

    async def last_values(self, key: Key, *, series: str | None, after: str | None, limit: int) -> LastValuePage:
        """The last values of a key, of one series or of those after one; also while not leading. Raises
        `LastValueStoreError`, and `PoolConflictError` for a pool without a log."""
        ...

    async def last_value_totals(self) -> Counts | None:
        """What the last-value reader has counted; None for a pool without a log. Raises `LastValueStoreError`."""
        ...

    def retrying(self) -> Mapping[int, int]:
        """Requests that wait for their next attempt, by delay in milliseconds; empty while not leading."""
        ...

    async def start_group(self, key: Key) -> None:
        """Require the group, as a request would."""
        ...

    async def stop_group(self, key: Key) -> bool:
        """Begin the orderly end of the group now instead of after `unbind_delay`; no queued request is lost.

        Returns False if there is no group. Raises `PoolConflictError` if the key is pinned.
        """
        ...

    async def pin(self, key: Key) -> None:
        """Keep the group up until `unpin`. Stored in RabbitMQ, so that it outlives this daemon."""
        ...

    async def unpin(self, key: Key) -> None: ...

    async def reload_group(self, key: Key, *, timeout: float) -> list[ReloadView]:
        """Have the workers of the group load their data again, and wait at most `timeout` seconds for the outcome."""
        ...

    async def logs(self, key: Key, *, lines: int) -> dict[str, tuple[str, ...]]:
        """The last log lines of each worker of the group, by worker id."""
        ...

    async def previous_logs(self, key: Key, *, lines: int) -> list[WorkerDeath]:
        """The last ended worker of each slot of the group in this term, with its last log lines; earliest end first."""
        ...

    async def process_logs(self, worker_id: WorkerId, *, lines: int) -> tuple[str, ...]:
        """The last log lines of a process of pooled workers, of all its keys; none if there is no such process."""
        ...
