"""A leader on a broker in memory: the real session, term, loops and processors, in virtual time.

    async with leading(clock) as stack:
        stack.publish("a", b"1")
        await clock.advance(1)

Clients and workers of a test talk to the same broker through `stack.client` and `stack.worker`. A second `leading` on
the same `FakeBroker` and `FakeBackend` is the next leader, or a rival.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pydantic import SecretStr

from osrdyne.amqp import Consumer, Delivery, Message
from osrdyne.broker.session import LeaderSession
from osrdyne.config.models import BrokerSettings, LifecycleSettings, PoolSettings, Settings
from osrdyne.daemon.term import StopRequest, Term
from osrdyne.daemon.wiring import Resources
from osrdyne.metrics import Metrics
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import TokenVerifier
from osrdyne.pool.state.groups.admission import KeyCounter
from osrdyne.protocol.activity import ActivityReport, Event
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.drivers import FakeDriver
from osrdyne.testing.fakes.amqp import FakeChannel, FakeConnection, connect_to
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.management import FakeManagement
from osrdyne.testing.fakes.verbs import LeaderVerbs

POOL = "pool"
TIMES = LifecycleSettings(unbind_delay=600.0, stop_delay=600.0, settle_delay=10.0)


def settings_for(lifecycle: LifecycleSettings = TIMES) -> Settings:
    """Settings for tests. The topology is compared once an hour by default, because that is most of the work in virtual
    time."""
    if "topology_interval" not in lifecycle.model_fields_set:
        lifecycle = lifecycle.model_copy(update={"topology_interval": 3600.0})
    uri = SecretStr("amqp://user@nowhere/")
    return Settings(pool=PoolSettings(id=POOL), broker=BrokerSettings(uri=uri), lifecycle=lifecycle)


@dataclass(slots=True)
class Stack(LeaderVerbs):
    """A leader with all parts that a test observes or breaks."""

    clock: VirtualClock
    broker: FakeBroker
    management: FakeManagement
    driver: FakeDriver
    settings: Settings
    metrics: Metrics = field(default_factory=Metrics)
    names: PoolNames = field(default_factory=lambda: PoolNames(POOL))
    connections: list[FakeConnection] = field(default_factory=list)
    stop: StopRequest = field(default_factory=lambda: StopRequest(asyncio.Event()))
    term: Term = field(init=False)
    leading: asyncio.Event = field(default_factory=asyncio.Event)
    pinned: set[Key] = field(default_factory=set)
    """Keys that an operator has pinned before the term, besides those of the settings."""
    task: asyncio.Task[None] = field(init=False)
    killed: bool = False
    verifier: TokenVerifier | None = None

    # --- as a client

    async def publish(self, key: str, body: bytes = b"", **properties: object) -> None:
        """Publish with a confirm, as a client."""
        message = Message(body=body, **properties)  # type: ignore[arg-type]
        await FakeChannel(self.broker, confirms=True).publish(
            message, exchange=self.names.requests_exchange, routing_key=key, mandatory=True
        )

    def waiting(self, key: str) -> list[bytes]:
        """The bodies of the requests in the queue of a key."""
        return self.broker.bodies(self.names.request_queue(Key(key)))

    def orphans(self) -> list[bytes]:
        return self.broker.bodies(self.names.orphan_queue)

    # --- as a worker

    async def consume(self, key: str) -> Consumer:
        """Consume the queue of a key, as a worker."""
        channel = FakeChannel(self.broker)
        return await channel.consume(self.names.request_queue(Key(key)), prefetch=1)

    async def take(self, key: str) -> Delivery:
        """Take one request as a worker, without an answer or acknowledgement."""
        consumer = await self.consume(key)
        await self.clock.settle()
        return await consumer.get()

    async def report(self, key: str, event: Event, worker_id: str | None = None, **details: object) -> None:
        """Report as a worker of the key; by default the oldest one."""
        name = worker_id or str(self.driver.workers_of(Key(key))[0].instance.worker_id)
        report = ActivityReport(key, event, name, details)
        await FakeChannel(self.broker).publish(
            Message(body=report.wire_body(), headers=report.wire_headers()),
            exchange=self.names.activity_exchange,
            routing_key=key,
        )
        await self.clock.settle()

    # --- state

    def is_bound(self, key: str) -> bool:
        """Whether the broker would route a request of this key to its queue."""
        return self.broker.route(self.names.requests_exchange, key) == [self.names.request_queue(Key(key))]

    def has_queue(self, key: str) -> bool:
        return self.names.request_queue(Key(key)) in self.broker.queues

    def running(self, key: str) -> int:
        """The number of running workers of the key."""
        return sum(worker.instance.state == "running" for worker in self.driver.workers_of(Key(key)))

    # --- the leader

    async def lead(self) -> None:
        """Acquire the token and run one term, as the daemon does."""
        try:
            await self._lead()
        except BaseException:
            if not self.killed:
                raise

    async def _lead(self) -> None:
        async with LeaderSession(
            self.settings, clock=self.clock, connect=connect_to(self.broker, self.connections)
        ) as session:
            _, token = await session.acquire()
            self.term = Term(
                Resources(
                    context=TermContext(session.names, self.settings, self.clock, self.metrics),
                    session=session,
                    token=token,
                    driver=self.driver,
                    management=self.management,
                    open_pool=self._open_pool,
                    key_counter=KeyCounter(self.settings.lifecycle.max_distinct_keys),
                    verifier=self.verifier,
                )
            )
            await self.term.run(self.stop, on_leading=self.leading.set)

    async def _open_pool(self) -> list[Key]:
        return [*map(Key, self.settings.pool.pinned_keys), *self.pinned]

    async def kill(self) -> None:
        """End the leader as SIGKILL does: its connections are cut, and nothing is closed in order."""
        self.killed = True
        self.task.cancel()
        for connection in self.connections:
            connection.cut()
        await asyncio.wait({self.task})


def make_stack(
    clock: VirtualClock,
    *,
    broker: FakeBroker | None = None,
    driver: FakeDriver | None = None,
    settings: Settings | None = None,
    metrics: Metrics | None = None,
) -> Stack:
    broker = broker or FakeBroker(clock)
    return Stack(
        clock=clock,
        broker=broker,
        management=FakeManagement(broker),
        driver=driver or FakeDriver(clock, pool=POOL),
        settings=settings or settings_for(),
        metrics=metrics or Metrics(),
    )


@asynccontextmanager
async def leading(
    clock: VirtualClock,
    *,
    broker: FakeBroker | None = None,
    driver: FakeDriver | None = None,
    settings: Settings | None = None,
    stop: StopRequest | None = None,
    verifier: TokenVerifier | None = None,
) -> AsyncIterator[Stack]:
    """Run a leader in this context, and cancel it at the end. Raises the error of a term that ended before."""
    stack = make_stack(clock, broker=broker, driver=driver, settings=settings)
    stack.stop = stop or stack.stop
    stack.verifier = verifier
    async with asyncio.TaskGroup() as group:
        stack.task = group.create_task(stack.lead(), name="leader")
        await clock.settle()
        while not stack.leading.is_set():
            await clock.advance(0.1)
        yield stack
        await clock.settle()
        if not stack.task.done():
            stack.task.cancel()
