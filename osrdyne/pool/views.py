"""What the pool shows of itself: frozen values for the HTTP API, the CLI and the metrics.

`PoolInspector` is implemented by the daemon and, in tests, by a fake; nothing here changes anything by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from osrdyne.ingress.explain import Explanation
from osrdyne.ingress.requests import Arrival
from osrdyne.pool.routing.manifest_store import KeptManifest, ManifestChange, ManifestKind
from osrdyne.pool.state.crashes import WorkerDeath
from osrdyne.pool.state.groups import GroupStatus
from osrdyne.pool.state.worker_reports import WorkerState
from osrdyne.protocol.control import Generation
from osrdyne.protocol.names import Key


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker. Times are seconds since the epoch; `in_flight` requests it is running."""

    worker_id: str
    key: Key
    external_id: str
    state: WorkerState
    slot: int = 0
    in_flight: int = 0
    started_at: float | None = None
    last_report_at: float | None = None
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueueView:
    """The request queue of a group as this term knows it."""

    name: str
    exists: bool
    bound: bool


@dataclass(frozen=True, slots=True)
class WaitingView:
    """What waits in one priority class (None: the default one) and no worker has taken. `oldest_age` in seconds, None
    where nothing waits or nobody knows."""

    priority: int | None
    requests: int
    oldest_age: float | None


@dataclass(frozen=True, slots=True)
class GroupView:
    """One worker group. `next_transition` names the next state, `next_transition_at` when (seconds since the epoch),
    `reason` why the group is in its state and what it waits for, in a sentence for a person. `waiting`: by class, as of
    the latest comparison with RabbitMQ."""

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
    """Whether the daemon cannot do its work while it is not ok."""


@dataclass(frozen=True, slots=True)
class LeadershipView:
    """Whether this daemon leads its pool, and since when (seconds since the epoch)."""

    leading: bool
    term: int | None
    since: float | None
    detail: str


@dataclass(frozen=True, slots=True)
class PoisonView:
    """One entry of the poison inventory; `key`, `deliveries` and the times are None where nobody knows them.

    `deliveries` is RabbitMQ's count. `finding` says in a sentence what the deaths mean, `replays` how often a person
    has sent the request again before. `body` is None in a list without bodies.
    """

    id: str
    key: str | None
    path: str
    correlation_id: str | None
    reply_to: str | None
    message_id: str | None
    app_id: str | None
    content_type: str | None
    reason: str
    deliveries: int | None
    deaths: tuple[WorkerDeath, ...]
    finding: str
    replays: int
    first_at: float | None
    last_at: float | None
    size_bytes: int
    headers: dict[str, object]
    body: bytes | None

    @property
    def unexplained(self) -> int | None:
        """Deliveries that no known death explains."""
        return None if self.deliveries is None else max(0, self.deliveries - len(self.deaths))


@dataclass(frozen=True, slots=True)
class PoisonQuery:
    """Which entries: of these keys, of this path, that came more or less than so many seconds ago; at most `limit`
    after the place `after`."""

    keys: frozenset[str] | None = None
    path: str | None = None
    older_than: float | None = None
    newer_than: float | None = None
    after: str | None = None
    limit: int = 100
    bodies: bool = False


@dataclass(frozen=True, slots=True)
class PoisonPage:
    """Entries, oldest first. `total`: how many match; `next`: the place to go on after, None at the end; `complete`:
    False when the inventory holds more than is looked at."""

    entries: tuple[PoisonView, ...]
    total: int
    next: str | None
    complete: bool = True


@dataclass(frozen=True, slots=True)
class PoisonOutcome:
    """What became of the entries of an action: done, not there, or refused and why."""

    done: tuple[str, ...]
    missing: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)


class PoisonInspector(Protocol):
    """What the API asks about the poison inventory. Every method raises `LeadershipLostError` while this daemon does
    not lead: only the leader reads the queue."""

    @property
    def pool(self) -> str: ...

    async def poison(self, query: PoisonQuery) -> PoisonPage:
        """Entries of the poison inventory, none consumed."""
        ...

    async def poison_entry(self, entry: str) -> PoisonView:
        """One entry with its body, by its id or a unique beginning of it. Raises `PoisonNotFoundError`."""
        ...

    async def replay_poison(self, entries: Sequence[str]) -> PoisonOutcome:
        """Send requests again, as they were, and remove their entries."""
        ...

    async def drop_poison(self, entries: Sequence[str]) -> PoisonOutcome:
        """Remove entries for good."""
        ...


class ManifestInspector(Protocol):
    """Every method raises `LeadershipLostError` while this daemon does not lead, and `PoolConflictError` in a direct
    pool. `expected` is the version that a change expects to be in force, 0 for none; where another is, it raises
    `VersionConflictError`."""

    @property
    def pool(self) -> str: ...

    async def current_manifest(self, kind: ManifestKind) -> KeptManifest | None:
        """The version in force; None when there has never been one."""
        ...

    async def manifests(self, kind: ManifestKind) -> list[KeptManifest]:
        """Every version that is kept, the newest first, which is in force; empty when there has never been one."""
        ...

    async def change_manifest(
        self, kind: ManifestKind, text: str, *, author: str, expected: int | None = None
    ) -> ManifestChange:
        """Put the manifest of a text in force. Raises `InvalidDocumentError` with every error of it."""
        ...

    async def restore_manifest(
        self, kind: ManifestKind, version: int, *, author: str, expected: int | None = None
    ) -> ManifestChange:
        """Put an earlier version in force again, as a new version. Raises `PoolConflictError` when it is not kept."""
        ...

    async def clear_manifest(self, kind: ManifestKind, *, author: str, expected: int | None = None) -> ManifestChange:
        """Return to no manifest, as a new version. Raises `PoolConflictError` where there is none."""
        ...

    async def explain(self, arrival: Arrival) -> Explanation:
        """What would happen to this request now."""
        ...


class PoolInspector(PoisonInspector, ManifestInspector, Protocol):
    """What the API asks of the daemon. Every method may be called at any time, also while not leading.

    The asynchronous ones but `leader` raise `LeadershipLostError` while this daemon does not lead, and
    `InvalidKeyError` for a bad key.
    """

    @property
    def pool(self) -> str: ...

    def leadership(self) -> LeadershipView: ...

    async def leader(self) -> str | None:
        """The address of the leader's API; None where nobody is known to lead."""
        ...

    def components(self) -> list[ComponentView]: ...

    def groups(self) -> list[GroupView]:
        """All groups, ordered by key; empty while not leading."""
        ...

    def group(self, key: Key) -> GroupView | None: ...

    def waiting(self) -> list[WaitingView]:
        """What waits in queues by priority class, over all groups; empty while not leading."""
        ...

    def retrying(self) -> Mapping[int, int]:
        """Requests that wait for their next attempt, by delay in milliseconds; empty while not leading."""
        ...

    async def start_group(self, key: Key) -> None:
        """Require the group, as a request would."""
        ...

    async def stop_group(self, key: Key) -> None:
        """Begin the group's orderly end now instead of after `unbind_delay`; nothing queued is lost.

        Raises `PoolConflictError` when the key is pinned.
        """
        ...

    async def pin(self, key: Key) -> None:
        """Keep the group up until `unpin`; kept in RabbitMQ, so that it outlives this daemon."""
        ...

    async def unpin(self, key: Key) -> None: ...

    async def logs(self, key: Key, *, lines: int) -> dict[str, tuple[str, ...]]:
        """The last log lines of each worker of the group, by worker id."""
        ...
