"""Views of the pool: frozen values for the HTTP API, the CLI and the metrics, and the interfaces that return them.

The daemon implements `PoolInspector`, and a fake does in tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from osrdyne.ingress.explain import Explanation
from osrdyne.ingress.requests import Arrival
from osrdyne.pool.routing.manifest_store import KeptManifest, ManifestChange, ManifestKind
from osrdyne.pool.state.groups import GroupStatus
from osrdyne.pool.state.worker_reports import WorkerState
from osrdyne.protocol.control import Generation
from osrdyne.protocol.names import Key
from osrdyne.protocol.poison import PoisonOutcome, PoisonRecord


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
    shares with workers of other keys, if it does. `cold_start`: milliseconds of each part of its start."""

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


@dataclass(frozen=True, slots=True)
class ProcessView:
    """One process of pooled workers. Memory in bytes, None if it is unknown: `heap_used` and `heap_max` of the JVM,
    `memory` as the proportional set size of the process with its JVM. Times are seconds since the epoch.

    `state`: `starting`, `ready`, `spare` (ready and without workers), `retiring` (its workers are being replaced) or
    `ended`. `requests`: served since its start. `alone`: the only key that it takes.
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
    requests: int = 0
    started_at: float | None = None
    last_report_at: float | None = None
    retiring: str | None = None
    alone: Key | None = None


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
    epoch); `reason` is a sentence that explains the state of the group and its next change. `waiting`: by
    level, as of the latest resync."""

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
    """Access to the manifests of a managed pool for the API. Every method raises `LeadershipLostError` while this
    daemon does not lead, and `PoolConflictError` in a direct pool. `expected` is the version that a change expects
    to be active, 0 for none; if another version is active, it raises `VersionConflictError`."""

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

    async def explain(self, arrival: Arrival) -> Explanation:
        """Explain what the active routes and splitter would do with a request."""
        ...


class PoolInspector(PoisonInspector, ManifestInspector, Protocol):
    """What the API needs from the daemon. Every method may be called at any time, also while not leading.

    The asynchronous methods except `leader` raise `LeadershipLostError` while this daemon does not lead, and
    `InvalidKeyError` for an invalid key.
    """

    @property
    def pool(self) -> str: ...

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

    def retrying(self) -> Mapping[int, int]:
        """Requests that wait for their next attempt, by delay in milliseconds; empty while not leading."""
        ...

    async def start_group(self, key: Key) -> None:
        """Require the group, as a request would."""
        ...

    async def stop_group(self, key: Key) -> None:
        """Begin the orderly end of the group now instead of after `unbind_delay`; no queued request is lost.

        Raises `PoolConflictError` if the key is pinned.
        """
        ...

    async def pin(self, key: Key) -> None:
        """Keep the group up until `unpin`. Stored in RabbitMQ, so that it outlives this daemon."""
        ...

    async def unpin(self, key: Key) -> None: ...

    async def logs(self, key: Key, *, lines: int) -> dict[str, tuple[str, ...]]:
        """The last log lines of each worker of the group, by worker id."""
        ...
