"""The interface of worker group drivers: the only things that start and stop workers.

The worker groups loop calls a driver; a driver never decides anything. Every method may be called again with the same
arguments, at any time, also after a restart of the controller: a driver keeps nothing that it cannot find again by
asking its backend. Everything it creates is labelled with pool, key, slot, worker id and specification hash.
Source: docs/reference/drivers, lifecycle: start-when-slot-is-free, unique-instance-names, stop-by-instance.
`registry` finds and builds drivers;
See `docs/how-to/write-a-driver.md`.
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
    """How an instance ended: an exit code or a signal name, and a sentence when more is known (`out of memory`).

    `shared`: workers of other keys were in its process, so that any of them may be the cause. `of_process`: it did not
    end by itself, but with its process.
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
    """One worker to be started: its place (pool, key, slot) and everything it is given.

    `environment` holds the credentials, so that neither it nor this value's repr may be logged. `spec_hash`: the hash
    that its instance carries; None: `Driver.spec_hash()`. `placement`: whether it has a process of its own, for a
    driver that has workers of both kinds; None: the kind of the driver.
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
    """One worker as the backend sees it now.

    `external_id` is what a person would look for (pid, container name). `started_at` is in seconds since the epoch.
    An exited instance is listed until `remove` is called, so that its end is never missed. `retiring`: the backend will
    end it, so that it is to be replaced first, as after a change of settings.
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
        """Which option cannot be used with the settings in `context`, and the remedy; None when all can be."""
        return None


@dataclass(frozen=True, slots=True)
class DriverContext:
    """The values that every driver gets besides its options.

    `stack` names the broker (`host:port/vhost`, no credentials): a driver whose backend is shared by several stacks
    keeps workers of the same pool id on different brokers apart by it. `worker_command` runs the pool's application
    with this very installation; a backend with images of its own runs `worker_app` (`MODULE:ATTRIBUTE`) with theirs.
    `worker_config` is the pool's `WORKER_CONFIG`, which is part of what shapes a worker. `uri_in_environment`: workers
    read the AMQP URI from `WORKER_AMQP_URI` and know no other way (`worker.environment: reference`). `pooled`: the
    driver starts processes of pooled workers.
    """

    pool: str
    stack: str
    clock: Clock
    worker_command: tuple[str, ...]
    worker_app: str = ""
    worker_config: Mapping[str, object] = field(default_factory=dict, repr=False)
    uri_in_environment: bool = False
    pooled: bool = False

    @property
    def worker_shape(self) -> Mapping[str, object]:
        """The pool's settings that shape a worker, for `Driver.spec_hash`: a change of them replaces workers."""
        return self.shape_of(None)

    def shape_of(self, config: Mapping[str, object] | None) -> Mapping[str, object]:
        """The same for a group with a worker configuration of its own; None: that of the pool."""
        # A further name in the default case would be another hash, and an upgrade would replace all workers.
        reference = {"environment": "reference"} if self.uri_in_environment else {}
        return {**(self.worker_config if config is None else config), **reference}

    @property
    def uses_kubernetes_executors(self) -> bool:
        """Whether Spark in the workers asks Kubernetes for executors (`worker.spark_master: k8s://…`)."""
        return uses_kubernetes_executors(self.worker_config)

    @property
    def stop_grace(self) -> float | None:
        """The seconds that a worker has to end (`worker.stop_grace`), as it is given them; None if it is not."""
        runtime = self.worker_config.get("runtime")
        grace = runtime.get("stop_grace") if isinstance(runtime, Mapping) else None
        return grace if isinstance(grace, int | float) else None


def uses_kubernetes_executors(config: Mapping[str, object]) -> bool:
    """Whether Spark in a worker with this configuration asks Kubernetes for executors."""
    spark = config.get("spark")
    try:
        master = parse_spark_master(str(spark.get("master"))) if isinstance(spark, Mapping) else None
    except ValueError:  # the configuration refuses it; a driver of a test may get anything
        return False
    return master is not None and master.kind is MasterKind.KUBERNETES


class Driver(ABC):
    """Starts, lists and stops the workers of one pool.

    A driver is built inside the running event loop by `registry.create_driver` as `Class(options, context)`, where
    `options` is an instance of its `options_model`. Building does no I/O, so that it cannot fail.

    Errors: every method may raise `DriverUnavailableError` when the backend does not answer; the caller backs off and
    nothing else is affected. A cancelled call may still take effect: `list_instances` tells.
    """

    name: ClassVar[str]
    options_model: ClassVar[type[DriverOptions]] = DriverOptions
    """What `driver.options` may hold; by default nothing."""
    manages_workers: ClassVar[bool] = True
    """False for `noop`: operators start the workers, so a missing one is no failure and `start` is not called."""
    instance_is_worker: ClassVar[bool] = True
    """False when an instance is a whole group, whose workers the platform counts, scales and ends itself (Kubernetes):
    the pool then wants one instance, ends it by `stop` alone, and changes its settings by `update`."""
    workers_of_start: int = 1
    """How many workers there may be of one start, at the same time; they share its credentials. May depend on the
    options."""
    same_host: bool = False
    """True when the workers live on the controller's own host: a standby must then be on the same host. May depend on
    the options."""

    def __init__(self, options: DriverOptions, context: DriverContext) -> None:
        """A driver that has options of its own keeps them itself, in their own type."""
        self.context = context

    def obstacle_to_processes(self) -> str | None:
        """Why this driver cannot start processes of pooled workers; None if it can.

        Such a start has `Placement.POOLED` in its environment. Its instance must be one process: it has the worker id
        of the start, and the platform never starts it again (lifecycle: pooled-ids-once).
        """
        if not self.manages_workers:
            return (
                f"the driver {self.name} starts no processes, and can neither list nor kill those that you start: "
                "the leader could not tell which workers run."
            )
        if not self.instance_is_worker:
            return (
                f"with the driver {self.name} the platform counts the processes of a group itself, so workers cannot "
                "be assigned to one of them."
            )
        return None

    @abstractmethod
    def spec_hash(self, config: Mapping[str, object] | None = None) -> str:
        """A hash of all that shapes a worker: options, worker command, worker configuration. The same settings give
        the same hash, also in another process; every instance carries the hash it was started with.

        `config`: the worker configuration of a group with a profile; None: that of the pool. The pool passes the hash
        of a group in `WorkerSpec.spec_hash`.
        """

    @abstractmethod
    async def list_instances(self) -> list[Instance]:
        """Every instance of this pool, in any state, including those of an earlier controller.

        Complete or an error: a partial answer would make the caller start a second worker for a key.
        """

    @abstractmethod
    async def start(self, spec: WorkerSpec) -> Instance:
        """Create the worker of (pool, key, slot) and return it, running or not.

        The name is created atomically: raises `SlotTakenError` when an instance of that slot exists in any state
        (lifecycle: unique-instance-names), `StartFailedError` if the backend refuses it permanently (no such image, no
        such command).
        A worker that comes up and then exits is not an error here: it is listed as exited.
        """

    async def update(self, instance_id: InstanceId, spec: WorkerSpec) -> Instance | None:
        """Give an instance that is a whole group the present settings; None when it is gone or going.

        Only called where `instance_is_worker` is false. The instance keeps its id, its credentials, and the number of
        its workers; the platform replaces them one by one. Errors are those of `start`.
        """
        raise NotImplementedError(
            f"The driver {self.name} does not count workers itself: each of its instances is one worker."
        )

    @abstractmethod
    async def stop(self, instance_id: InstanceId, *, grace: float) -> None:
        """Ask the instance to end (SIGTERM), kill it after `grace` seconds, return when it is gone.

        An instance that does not exist, or has exited, is not an error. Never touches anything else, also when the
        backend has given the same pid or name to someone else meanwhile.
        """

    @abstractmethod
    async def remove(self, instance_id: InstanceId) -> None:
        """Forget an exited instance and free its slot; its logs may go with it.

        An unknown instance is not an error. One that still runs is left alone.
        """

    @abstractmethod
    async def logs(self, instance_id: InstanceId, *, lines: int = 50) -> tuple[str, ...]:
        """The last lines the instance wrote, oldest first; empty when nothing is known. They go to callers, so that
        what looks like a URI's password is masked in them (`osrdyne.logs.mask_uri`)."""

    @abstractmethod
    def events(self) -> AsyncIterator[None]:
        """Yields whenever `list_instances` may answer differently than before. May miss and may repeat."""

    @abstractmethod
    async def check(self) -> list[Finding]:
        """What `doctor` wants to know: is the backend there, are the options usable. Raises nothing."""

    async def close(self) -> None:  # noqa: B027 - an optional hook
        """Release what this object holds. Workers go on running."""


def new_worker_id() -> WorkerId:
    """A unique worker id; fits every backend's names."""
    return WorkerId(uuid.uuid4().hex[:16])


def hash_options(options: Mapping[str, object]) -> str:
    """A short stable hash of JSON-like options, for `Driver.spec_hash`."""
    text = json.dumps(options, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
