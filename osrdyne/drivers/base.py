"""The interface of worker group drivers, the only components that start and stop workers.

The worker groups loop calls a driver; a driver decides nothing. Every method may be called again with the same
arguments, at any time, also after a restart of the controller: a driver keeps no state that it cannot read from its
backend again. Everything it creates is labelled with pool, key, slot, worker id and specification hash. `registry`
finds and builds drivers. Source: docs/reference/drivers, docs/how-to/write-a-driver.md, lifecycle:
start-when-slot-is-free, unique-instance-names, stop-by-instance.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, NewType

from osrdyne.aio.clock import Clock
from osrdyne.config.models import Model
from osrdyne.findings import Finding as Finding
from osrdyne.protocol.control import Generation
from osrdyne.protocol.environment import Placement, WorkerEnvironment
from osrdyne.protocol.names import Key, WorkerId
from osrdyne.protocol.spark_master import MasterKind, parse_spark_master

InstanceId = NewType("InstanceId", str)
"""The backend's name of an instance for as long as it exists: container id, pod uid, pid + start time."""


class InstanceState(StrEnum):
    RUNNING = "running"
    STOPPING = "stopping"
    EXITED = "exited"


@dataclass(frozen=True, slots=True)
class Exit:
    """How an instance ended: an exit code or a signal name, and the reason if it is known (`out of memory`).

    `shared`: workers of other keys were in its process, so that any of them may be the cause. `of_process`: it ended
    with its process, not by itself.
    """

    code: int | None = None
    signal: str | None = None
    reason: str | None = None
    shared: bool = False
    of_process: bool = False

    def __str__(self) -> str:
        text = (
            f"signal {self.signal}" if self.signal else f"exit code {self.code}" if self.code is not None else "ended"
        )
        return f"{text} ({self.reason})" if self.reason else text


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker to be started: its pool, key and slot, and its environment.

    `environment` contains the credentials, so it must not be logged. `spec_hash`: the hash that the instance carries;
    None: `Driver.spec_hash()`. `placement`: whether the worker has a process of its own, for a driver with workers of
    both kinds; None: the kind of the driver.
    """

    environment: WorkerEnvironment = field(repr=False)
    generation: Generation
    slot: int = 0
    spec_hash: str | None = None
    placement: Placement | None = None

    @property
    def pool(self) -> str:
        return self.environment.pool

    @property
    def key(self) -> Key:
        return self.environment.key

    @property
    def worker_id(self) -> WorkerId:
        return self.environment.worker_id


@dataclass(frozen=True, slots=True)
class Instance:
    """One worker as the backend lists it.

    `external_id`: for operators, such as a pid or a container name. `started_at`: seconds since the epoch. An exited
    instance is listed until `remove` is called, so that its end is never missed. `retiring`: the backend will end it,
    so that it must be replaced first, as after a change of settings.
    """

    instance_id: InstanceId
    key: Key
    slot: int
    worker_id: WorkerId
    state: InstanceState
    spec_hash: str
    started_at: float
    external_id: str
    exit: Exit | None = None
    retiring: bool = False


class DriverOptions(Model):
    """Base of a driver's own options (`driver.options`): frozen, and an unknown option is an error with its path."""

    def contradiction(self, context: DriverContext) -> str | None:
        """The option that conflicts with the settings in `context`, and the remedy; None if none does."""
        return None


@dataclass(slots=True)
class AppRevision:
    """How often the application has changed while the daemon ran; part of every specification hash if it has."""

    number: int = 0


@dataclass(frozen=True, slots=True)
class DriverContext:
    """The values that every driver gets besides its options.

    `stack`: the broker (`host:port/vhost`, no credentials). It distinguishes pools of the same id on different brokers,
    if their backend is the same. `worker_command`: runs the pool's application with the installation of the daemon; a
    backend with images of its own runs `worker_app` (`MODULE:ATTRIBUTE`) with theirs. `worker_config`: the pool's
    `WORKER_CONFIG`, which is part of the specification hash. `uri_in_environment`: workers read the AMQP URI from
    `WORKER_AMQP_URI` only (`worker.environment: reference`). `pooled`: the driver starts processes of pooled workers.
    `revision`: of the application, counted by the daemon (`osrdyne dev`).
    """

    pool: str
    stack: str
    clock: Clock
    worker_command: tuple[str, ...]
    worker_app: str = ""
    worker_config: Mapping[str, object] = field(default_factory=dict, repr=False)
    uri_in_environment: bool = False
    pooled: bool = False
    revision: AppRevision = field(default_factory=AppRevision)

    @property
    def worker_shape(self) -> Mapping[str, object]:
        """The pool's settings that are part of `Driver.spec_hash`: a change of them replaces workers."""
        return self.shape_of(None)

    def shape_of(self, config: Mapping[str, object] | None) -> Mapping[str, object]:
        """The same for a group with a worker configuration of its own; None: that of the pool."""
        # Not a further name for the default: the hash would change, and an upgrade would replace all workers.
        reference = {"environment": "reference"} if self.uri_in_environment else {}
        revision = {"revision": self.revision.number} if self.revision.number else {}
        return {**(self.worker_config if config is None else config), **reference, **revision}

    @property
    def uses_kubernetes_executors(self) -> bool:
        """Whether Spark in the workers requests executors from Kubernetes (`worker.spark_master: k8s://…`)."""
        return uses_kubernetes_executors(self.worker_config)

    @property
    def stop_grace(self) -> float | None:
        """The seconds that a worker has to end (`worker.stop_grace`), from its configuration; None if not in it."""
        runtime = self.worker_config.get("runtime")
        grace = runtime.get("stop_grace") if isinstance(runtime, Mapping) else None
        return grace if isinstance(grace, int | float) else None


def uses_kubernetes_executors(config: Mapping[str, object]) -> bool:
    """Whether Spark in a worker with this configuration requests executors from Kubernetes."""
    spark = config.get("spark")
    try:
        master = parse_spark_master(str(spark.get("master"))) if isinstance(spark, Mapping) else None
    except ValueError:  # invalid masters are refused by the settings, but not by tests of drivers
        return False
    return master is not None and master.kind is MasterKind.KUBERNETES


class Driver(ABC):
    """Starts, lists and stops the workers of one pool.

    A driver is built inside the running event loop by `registry.create_driver` as `Class(options, context)`, where
    `options` is an instance of its `options_model`. Building does no I/O, so that it cannot fail.

    Errors: every method may raise `DriverUnavailableError` if the backend does not answer; the caller then backs off.
    Any other error that a docstring does not name ends the leader's term. A cancelled call may still take effect; a
    later `list_instances` shows that.
    """

    name: ClassVar[str]
    options_model: ClassVar[type[DriverOptions]] = DriverOptions
    """The model of `driver.options`; by default without options."""
    manages_workers: ClassVar[bool] = True
    """False for `noop`: operators start the workers, so a missing one is not a failure, and `start` is not called."""
    instance_is_worker: ClassVar[bool] = True
    """False if an instance is a whole group, whose workers the platform counts, scales and ends itself (Kubernetes):
    the pool then has one instance for a group, ends it only by `stop`, and changes its settings by `update`."""
    workers_of_start: int = 1
    """The maximum number of concurrent workers of one start; they share its credentials. May depend on the options."""
    same_host: bool = False
    """True if the workers run on the controller's own host: a standby must then be on the same host. May depend on the
    options."""

    def __init__(self, options: DriverOptions, context: DriverContext) -> None:
        """Keep the context. A driver with options keeps them itself, with their type."""
        self.context = context

    def obstacle_to_processes(self) -> str | None:
        """Why this driver cannot start processes of pooled workers; None if it can.

        The environment of such a start has `Placement.POOLED`. Its instance must be one process with the worker id of
        the start, which the platform never starts again (lifecycle: pooled-ids-once).
        """
        if not self.manages_workers:
            return (
                f"the driver {self.name} starts no processes, and can neither list nor kill those that you start: "
                "the leader would not know which workers run."
            )
        if not self.instance_is_worker:
            return (
                f"with the driver {self.name} the platform counts the processes of a group itself, so workers cannot "
                "be assigned to one of them."
            )
        return None

    @abstractmethod
    def spec_hash(self, config: Mapping[str, object] | None = None) -> str:
        """A hash of all settings that affect a worker: options, worker command, worker configuration. It depends on
        nothing else, so that it is the same in another process. Every instance carries the hash of its start.

        `config`: the worker configuration of a group with a profile; None: that of the pool. The pool passes the hash
        of a group in `WorkerSpec.spec_hash`.
        """

    @abstractmethod
    async def list_instances(self) -> list[Instance]:
        """List every instance of this pool, in any state, including those of an earlier controller.

        Raises an error if the list may be incomplete: otherwise the pool would start a second worker for a key.
        """

    @abstractmethod
    async def start(self, spec: WorkerSpec) -> Instance:
        """Create the worker of (pool, key, slot) and return it, running or not.

        The name is created atomically: raises `SlotTakenError` if an instance of that slot exists in any state
        (lifecycle: unique-instance-names), and `StartFailedError` if the backend refuses the worker permanently (no
        such image, no such command). A worker that starts and then exits is not an error: it is listed as exited. After
        a `DriverUnavailableError` the pool may start a dedicated worker again under the same worker id.
        """

    async def update(self, instance_id: InstanceId, spec: WorkerSpec) -> Instance | None:
        """Apply the present settings to an instance that is a whole group; None if it has ended or is ending.

        Only called if `instance_is_worker` is false. The instance keeps its id, its credentials, and the number of its
        workers; the platform replaces them one by one. Raises the errors of `start`.
        """
        raise NotImplementedError(
            f"The driver {self.name} does not count workers itself: each of its instances is one worker."
        )

    @abstractmethod
    async def stop(self, instance_id: InstanceId, *, grace: float) -> None:
        """Send SIGTERM to the instance, kill it after `grace` seconds, and return when it has ended.

        No-op if the instance does not exist or has exited. Never affects anything else, even if the backend has given
        its pid or name to another process or object meanwhile.
        """

    @abstractmethod
    async def remove(self, instance_id: InstanceId) -> None:
        """Remove an exited instance, and its logs if they are part of it, and free its slot.

        No-op if the instance is unknown or still runs.
        """

    @abstractmethod
    async def logs(self, instance_id: InstanceId, *, lines: int = 50) -> tuple[str, ...]:
        """The last lines that the instance wrote, oldest first; none for an unknown instance. Passwords in URIs must be
        masked (`osrdyne.logs.mask_uri`), because the lines are sent to callers."""

    @abstractmethod
    def events(self) -> AsyncIterator[None]:
        """Yields when the result of `list_instances` may have changed. Events may be missing or repeated."""

    @abstractmethod
    async def check(self) -> list[Finding]:
        """Check for `doctor` whether the backend answers and the options can be used. Never raises."""

    async def close(self) -> None:  # noqa: B027 - an optional hook
        """Release the resources of this object. Workers continue to run."""


def new_worker_id() -> WorkerId:
    """A unique worker id, which is short enough for the names of every backend."""
    return WorkerId(uuid.uuid4().hex[:16])


def hash_options(options: Mapping[str, object]) -> str:
    """A short stable hash of JSON-like options, for `Driver.spec_hash`."""
    text = json.dumps(options, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
