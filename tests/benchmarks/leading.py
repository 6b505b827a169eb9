"""A leader in this process, with a driver that only notes when it is asked, for what measures or probes activation."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import ClassVar, Literal, Protocol

from osrdyne.aio.clock import SystemClock
from osrdyne.amqp import Channel, Connection, Message
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.publishing.publisher import LeaderPublisher
from osrdyne.broker.session import LeaderSession
from osrdyne.config.models import Settings, TelemetrySettings
from osrdyne.daemon.term import StopRequest, Term
from osrdyne.daemon.wiring import Resources
from osrdyne.drivers.base import DriverOptions, Instance, InstanceId, InstanceState, WorkerSpec
from osrdyne.drivers.noop import NoopDriver
from osrdyne.drivers.registry import driver_context
from osrdyne.metrics import Metrics
from osrdyne.pool.context import TermContext
from osrdyne.pool.state.groups.admission import KeyCounter
from osrdyne.protocol.names import Key, WorkerId

NEVER = 86_400.0
NO_LIMIT = 1_000_000
PATIENCE = 300.0


class Broker(Protocol):
    """Where RabbitMQ is."""

    @property
    def amqp_uri(self) -> str: ...
    @property
    def management_uri(self) -> str: ...


class Activations:
    """When each key's driver was asked and its first request was forwarded, and the wait for both."""

    def __init__(self) -> None:
        self._missing: dict[str, set[str]] = {}
        self._done: dict[str, asyncio.Future[float]] = {}

    def expect(self, key: Key) -> asyncio.Future[float]:
        """Gets the time (`perf_counter`) at which the key is active: forwarded, and the driver asked."""
        self._missing[key] = {"asked", "forwarded"}
        done = self._done[key] = asyncio.get_running_loop().create_future()
        return done

    def note(self, key: str, what: str) -> None:
        missing = self._missing.get(key, set())
        if what in missing:
            missing.remove(what)
            if not missing:
                self._done[key].set_result(time.perf_counter())


class Forwarded(Activations):
    """Counts the confirmed publishes of a leader that are `counted`, by their key or stream."""

    def __init__(self, wanted: int, counted: Callable[[str], bool]) -> None:
        super().__init__()
        self._wanted = self._left = wanted
        self._counted = counted
        self._done_at: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._began: float | None = None

    async def rate(self) -> float:
        """Messages a second, when all of them are forwarded."""
        ended = await asyncio.wait_for(self._done_at, PATIENCE)
        assert self._began is not None
        return self._wanted / (ended - self._began)

    def note(self, key: str, what: str) -> None:
        if what != "forwarded" or not self._counted(key):
            return
        self._began = self._began or time.perf_counter()
        self._left -= 1
        if self._left == 0:
            self._done_at.set_result(time.perf_counter())


class AskedDriver(NoopDriver):
    """Its workers exist in its list only."""

    name: ClassVar[str] = "asked"
    manages_workers: ClassVar[bool] = True

    def __init__(self, settings: Settings, activations: Activations, running: Iterable[Key] = ()) -> None:
        """`running`: keys that have a worker already."""
        super().__init__(DriverOptions(), driver_context(settings, clock=SystemClock()))
        self._activations = activations
        self._instances = [self._instance(key, 0, f"found.{number}") for number, key in enumerate(running)]

    async def list_instances(self) -> list[Instance]:
        return list(self._instances)

    async def start(self, spec: WorkerSpec) -> Instance:
        self._activations.note(spec.key, "asked")
        self._instances.append(self._instance(spec.key, spec.slot, spec.worker_id))
        return self._instances[-1]

    def _instance(self, key: Key, slot: int, worker_id: str) -> Instance:
        return Instance(
            instance_id=InstanceId(worker_id),
            key=key,
            slot=slot,
            worker_id=WorkerId(worker_id),
            state=InstanceState.RUNNING,
            spec_hash=self.spec_hash(),  # or each would be replaced at once, again and again
            started_at=time.time(),
            external_id="",
        )


class NotingPublisher(LeaderPublisher):
    """Notes what was confirmed."""

    def __init__(self, channel: Channel, connection: Connection, activations: Activations) -> None:
        super().__init__(channel, connection, clock=SystemClock())
        self._activations = activations

    async def publish(self, message: Message, *, exchange: str, routing_key: str, mandatory: bool = False) -> None:
        await super().publish(message, exchange=exchange, routing_key=routing_key, mandatory=mandatory)
        self._activations.note(routing_key, "forwarded")


async def no_pins() -> list[Key]:
    return []


@asynccontextmanager
async def leader(
    broker: Broker,
    pool: str,
    *,
    kind: Literal["direct", "managed"] = "direct",
    activations: Activations | None = None,
    running: Iterable[Key] = (),
    telemetry: TelemetrySettings | None = None,
) -> AsyncIterator[Activations]:
    """Lead `pool`, as the daemon does, until the end of the block. `running`: keys that have a worker already."""
    # The leader shares its event loop with the benchmark: on a busy machine it would lose its connection.
    at = {"uri": broker.amqp_uri, "management_uri": broker.management_uri, "leader_heartbeat": 30.0}
    never = dict.fromkeys(("unbind_delay", "start_timeout", "resync_interval"), NEVER)
    settings = Settings.model_validate(
        {
            "broker": at,
            "pool": {"id": pool, "kind": kind},
            "telemetry": telemetry or {},
            "driver": {"name": "noop"},
            "lifecycle": {**never, "max_groups": NO_LIMIT, "max_concurrent_starts": NO_LIMIT},
        }
    )
    activations = activations or Activations()
    clock, stop, leading = SystemClock(), StopRequest(asyncio.Event()), asyncio.Event()
    async with ManagementClient(settings.broker) as management, LeaderSession(settings, clock=clock) as session:
        channel = await session.publishing.channel(confirms=True)
        session.publisher = NotingPublisher(channel, session.publishing, activations)
        _, token = await session.token.acquire()
        term = Term(
            Resources(
                context=TermContext(session.names, settings, clock, Metrics()),
                session=session,
                token=token,
                driver=AskedDriver(settings, activations, running),
                management=management,
                open_pool=no_pins,
                key_counter=KeyCounter(settings.lifecycle.max_distinct_keys),
            )
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(term.run(stop, on_leading=leading.set), name="term")
            await leading.wait()
            yield activations
            stop.requested.set()
