"""What the pool shows of itself: frozen values for the HTTP API, the CLI and the metrics.

`PoolInspector` is implemented by the daemon and, in tests, by a fake; nothing here changes anything by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from osrdyne.protocol.control import Generation
from osrdyne.protocol.names import Key


class GroupState(StrEnum):
    """The expected state of a group. `stopping`: no longer wanted, its workers and queue are on their way out."""

    ACTIVE = "active"
    UNBOUND = "unbound"
    STOPPING = "stopping"


class WorkerState(StrEnum):
    """What a worker last said of itself, or what its driver says."""

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
class GroupView:
    """One worker group. `next_transition` names the next state, `next_transition_at` when (seconds since the epoch),
    `reason` why the group is in its state and what it waits for, in a sentence for a person."""

    key: Key
    state: GroupState
    generation: Generation
    queue: QueueView
    workers: tuple[WorkerView, ...]
    pinned: bool
    last_activity_at: float | None
    next_transition: str | None
    next_transition_at: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class ComponentView:
    """The health of one component: `broker`, `management`, `leadership`, `driver`, `orphans`, `dead-letters`, …"""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class LeadershipView:
    """Whether this daemon leads its pool, and since when (seconds since the epoch)."""

    leading: bool
    term: int | None
    since: float | None
    detail: str


@dataclass(frozen=True, slots=True)
class PoisonView:
    """One message of the poison inventory. `body` is shown as text where it is UTF-8."""

    position: int
    key: str
    path: str
    correlation_id: str | None
    reason: str
    first_at: float | None
    last_at: float | None
    deliveries: int | None
    size_bytes: int
    headers: dict[str, object]
    body: bytes


class PoolInspector(Protocol):
    """What the API asks of the daemon. Every method may be called at any time, also while not leading.

    The asynchronous ones raise `LeadershipLostError` while this daemon does not lead, `InvalidKeyError` for a bad key.
    """

    @property
    def pool(self) -> str: ...

    def leadership(self) -> LeadershipView: ...

    def components(self) -> list[ComponentView]: ...

    def groups(self) -> list[GroupView]:
        """All groups, ordered by key; empty while not leading."""
        ...

    def group(self, key: Key) -> GroupView | None: ...

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

    async def poison(self, *, limit: int) -> list[PoisonView]:
        """The first messages of the poison inventory, without consuming them."""
        ...
