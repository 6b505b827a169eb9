"""The answers of the HTTP API. Built from the pool's views; keys are raw text, times are seconds since the epoch.

No field may contain a secret: texts are masked again here. Other endpoints define their models in their own module.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

from osrdyne.logs import mask_uri
from osrdyne.pool.state.groups.transitions import GroupStatus
from osrdyne.pool.state.workers.worker_reports import WorkerState
from osrdyne.pool.views import (
    ComponentView,
    GroupView,
    LeadershipView,
    ProcessStatus,
    ProcessView,
    ReloadOutcome,
    WorkerView,
)

Masked = Annotated[str, AfterValidator(mask_uri)]  # Text to be shown; a password in a URI is replaced by `***`.


class Health(BaseModel):
    """The process is alive."""

    status: Literal["ok"] = "ok"


class Version(BaseModel):
    """The version of osrdyne."""

    version: str


class Component(BaseModel):
    """A component of the daemon and whether it works. While a `fatal` one does not work, the daemon is not ready."""

    name: str
    ok: bool
    fatal: bool
    detail: Masked

    @classmethod
    def of(cls, view: ComponentView) -> Component:
        return cls(name=view.name, ok=view.ok, fatal=view.fatal, detail=view.detail)


class Readiness(BaseModel):
    """Whether every required component works. A standby is ready as well."""

    ready: bool
    pool: str
    role: Literal["leader", "standby"]
    leader: Masked | None = Field(description="Address of the leader's API; null if no leader is known.")
    components: list[Component]


class Leadership(BaseModel):
    """Whether this daemon leads its pool, the term and its beginning, and the address of the leader."""

    pool: str
    leading: bool
    leader: Masked | None
    term: int | None
    since: float | None
    detail: Masked

    @classmethod
    def of(cls, pool: str, view: LeadershipView, *, leader: str | None) -> Leadership:
        return cls(pool=pool, leading=view.leading, leader=leader, term=view.term, since=view.since, detail=view.detail)


class WorkerMetadata(BaseModel):
    """A worker in the format of the reference client."""

    external_id: str
    worker_id: str
    worker_key: str
    metadata: dict[str, Masked]


class WorkerStatus(BaseModel):
    """`Ready` once the worker has loaded its data, `Loading` before."""

    worker_metadata: WorkerMetadata
    status: Literal["Loading", "Ready"]

    @classmethod
    def of(cls, view: WorkerView) -> WorkerStatus:
        metadata = WorkerMetadata(
            external_id=view.external_id, worker_id=view.worker_id, worker_key=view.key, metadata=view.metadata
        )
        return cls(worker_metadata=metadata, status="Ready" if view.state.serves else "Loading")


class Status(BaseModel):
    """Workers by key if the request names keys, otherwise by worker id, as in the reference implementation."""

    workers: dict[str, WorkerStatus]


class Worker(BaseModel):
    """One worker of a group."""

    worker_id: str
    external_id: str
    state: WorkerState
    slot: int
    in_flight: int
    started_at: float | None
    last_report_at: float | None
    process: str | None = Field(description="The process that it shares with other keys, by its worker id.")
    metadata: dict[str, Masked]
    cold_start: dict[str, int] = Field(default_factory=dict, description="Milliseconds of each part of its start.")
    executor_seconds: float | None = Field(
        None, description="Run time of its tasks since its start, in seconds on one core; null: unknown."
    )
    events_per_minute: float | None = Field(
        None, description="The rate limit of the quotas for its events; null: no limit, or unknown."
    )

    @classmethod
    def of(cls, view: WorkerView) -> Worker:
        return cls(
            worker_id=view.worker_id,
            external_id=view.external_id,
            state=view.state,
            slot=view.slot,
            in_flight=view.in_flight,
            started_at=view.started_at,
            last_report_at=view.last_report_at,
            process=view.process,
            metadata=view.metadata,
            cold_start=dict(view.cold_start),
            executor_seconds=view.executor_seconds,
            events_per_minute=view.events_per_minute,
        )


class Process(BaseModel):
    """One process of pooled workers. Memory in bytes, null if it is unknown."""

    worker_id: str
    external_id: str
    slot: int
    state: ProcessStatus
    keys: list[str]
    in_flight: int
    heap_used: int | None
    heap_max: int | None
    memory: int | None = Field(description="Proportional set size of the process with its JVM.")
    memory_share: float | None = Field(
        description="Used share of the memory of its host, or of its cgroup if that has less."
    )
    requests: int = Field(description="Requests served since its start.")
    started_at: float | None
    last_report_at: float | None
    retiring: Masked | None = Field(description="Why its workers are being replaced.")
    alone: str | None = Field(description="The only key that it takes.")
    profile: str | None = Field(None, description="Pattern of the first profile with its settings; null: the pool's.")
    cold_start: dict[str, int] = Field(default_factory=dict, description="Milliseconds of each part of its start.")
    executor_seconds: float | None = Field(
        None, description="Run time of the tasks of all its keys since its start, in seconds on one core."
    )

    @classmethod
    def of(cls, view: ProcessView) -> Process:
        return cls(**{**asdict(view), "keys": list(view.keys)})


class Processes(BaseModel):
    """The processes of pooled workers, by slot."""

    pool: str
    leading: bool
    processes: list[Process]


class Queue(BaseModel):
    """The request queue of a group."""

    name: str
    exists: bool
    bound: bool


class Transition(BaseModel):
    """The next state of a group, and when it begins."""

    state: str
    at: float | None


class Waiting(BaseModel):
    """The requests that wait in one priority level, by the latest resync with RabbitMQ."""

    priority: int | None = Field(description="0 to 9; null: the default level.")
    requests: int
    oldest_age: float | None = Field(description="Seconds; null if no request waits, and in direct pools.")


class Group(BaseModel):
    """One worker group: its state, the reason for it, and the next state."""

    key: str
    state: GroupStatus
    generation: str = Field(description="term.counter")
    pinned: bool
    queue: Queue
    workers: list[Worker]
    last_activity_at: float | None
    next_transition: Transition | None
    reason: Masked
    waiting: list[Waiting]
    profile: str | None = Field(None, description="Pattern of its profile; null: the settings of the pool.")
    settings: dict[str, Any] = Field(
        default_factory=dict,
        description="Effective values of the settings that a profile may change; of `spark_conf` the names only.",
    )
    policy: str | None = Field(None, description="The queue policy that acts on the key; null: none.")

    @classmethod
    def of(cls, view: GroupView) -> Group:
        following = view.next_transition
        return cls(
            key=view.key,
            state=view.state,
            generation=str(view.generation),
            pinned=view.pinned,
            queue=Queue(name=view.queue.name, exists=view.queue.exists, bound=view.queue.bound),
            workers=[Worker.of(worker) for worker in view.workers],
            last_activity_at=view.last_activity_at,
            next_transition=None if following is None else Transition(state=following, at=view.next_transition_at),
            reason=view.reason,
            waiting=[
                Waiting(priority=one.priority, requests=one.requests, oldest_age=one.oldest_age) for one in view.waiting
            ],
            profile=view.profile,
            settings=dict(view.settings),
            policy=view.policy,
        )


class Groups(BaseModel):
    """Groups, ordered by key."""

    pool: str
    leading: bool
    groups: list[Group]


class Accepted(BaseModel):
    """The request was accepted; the pool converges to the requested state."""

    key: str
    accepted: Literal["start", "stop", "pin", "unpin"]


class StopAccepted(Accepted):
    """`has_group`: whether there is a group for the key, which will stop; without one nothing happens."""

    has_group: bool


class WorkerReload(BaseModel):
    """The reload of one worker's data."""

    worker_id: str
    outcome: ReloadOutcome
    reason: Masked | None = Field(None, description="Why it failed.")


class Reload(BaseModel):
    """The reload of a group's data, by worker."""

    key: str
    workers: list[WorkerReload]


class WorkerEnd(BaseModel):
    """The end of a worker: its exit code or signal, and the reason that it has reported itself."""

    ended_with: Masked
    reason: Masked | None
    at: float = Field(description="Seconds since the epoch.")


class Logs(BaseModel):
    """The last log lines of each worker of a group, by worker id, oldest first."""

    key: str
    workers: dict[str, list[Masked]]
    ended: dict[str, WorkerEnd] = Field(
        default_factory=dict, description="With `previous`: how and when each of the workers has ended."
    )


class ProcessLogs(BaseModel):
    """The last log lines of a process of pooled workers, of all its keys, oldest first."""

    worker_id: str
    lines: list[Masked]


class ProblemDetail(BaseModel):
    """An error (RFC 9457), with a code for programs and a remedy for people."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    remedy: str | None = None
    leader: str | None = Field(None, description="Of `not-leading`: the address of the daemon that leads.")
