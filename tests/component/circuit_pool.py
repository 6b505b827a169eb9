"""A managed pool in virtual time whose backend may fail: a real leader, and workers that follow control messages."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

from managed_pool import REST, change, managed
from replies import REPLIES, answers, broker_with_replies

from osrdyne.amqp import Delivery, Message
from osrdyne.ingress.circuits.configuration import load_circuits
from osrdyne.pool.routing.circuits import CircuitView
from osrdyne.protocol.activity import ActivityReport, Event
from osrdyne.protocol.control import Command, control_from_wire
from osrdyne.protocol.messages import ROUTE_HEADER
from osrdyne.protocol.names import Key
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.drivers import FakeDriver, FakeWorker
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import POOL, Stack, leading

STEP = 0.05
DOCUMENT = {
    "circuitCheckEnabled": True,
    "statisticsUpdateEnabled": True,
    "errorThresholdPercentage": 50,
    "minQueueSampleCount": 4,
    "openToHalfOpen": {"enabled": True, "interval": 10_000},
    "unlockSampleQueues": {"enabled": True, "interval": 5_000},
    "unlockQueues": {"enabled": True, "interval": 1_000},
}


@dataclass
class PlayedWorker:
    """A worker that takes one request at a time while it is not paused, and one for each probe."""

    pool: CircuitPool
    key: str
    name: str
    control: str
    paused: bool
    is_deaf: bool = False
    """Its control messages are lost."""

    async def turn(self) -> None:
        channel = FakeChannel(self.pool.broker)
        while (delivery := await channel.get(self.control)) is not None:
            await delivery.ack()
            message = control_from_wire(delivery.body)
            if message is None or self.is_deaf:
                continue
            if message.command in {Command.PAUSE, Command.RESUME}:
                self.paused = message.command is Command.PAUSE
                await self.report_state()
            elif message.command is Command.PROBE:
                await self.probe(channel, str(message.details["id"]))
        queue = self.pool.names.request_queue(Key(self.key))
        if not self.paused and queue in self.pool.broker.queues and (request := await channel.get(queue)) is not None:
            await self.serve(request, None)

    async def probe(self, channel: FakeChannel, probe_id: str) -> None:
        self.pool.probes.append(self.key)
        queue = self.pool.names.request_queue(Key(self.key))
        request = await channel.get(queue) if queue in self.pool.broker.queues else None
        if request is None:
            await self.report_state(empty_probe=probe_id)
        else:
            await self.serve(request, probe_id)

    async def serve(self, request: Delivery, probe_id: str | None) -> None:
        if self.pool.loses_probes and probe_id is not None:
            return  # it hangs: the request stays unacknowledged
        self.pool.served.append((self.key, request.properties.correlation_id or "", probe_id is not None))
        status = "error" if self.pool.fails else "ok"
        if request.properties.reply_to:
            reply = Message(headers={"x-status": status}, correlation_id=request.properties.correlation_id)
            await FakeChannel(self.pool.broker).publish(reply, exchange="", routing_key=request.properties.reply_to)
        await request.ack()
        headers: dict[str, object] = {"x-status": status, "x-route": str(request.headers[ROUTE_HEADER])}
        headers |= {} if probe_id is None else {"x-probe": probe_id}
        details: dict[str, object] = {"count": 1, "outcomes": [request.fingerprint()], "in_flight": 0}
        if self.pool.random.random() >= self.pool.lost_reports:
            await self._report(Event.REQUEST_COMPLETED, details, headers)

    async def report_state(self, **more: object) -> None:
        await self._report(Event.READY, {"in_flight": 0, "paused": self.paused, "generation": [1, 0], **more}, {})

    async def _report(self, event: Event, details: dict[str, object], headers: dict[str, object]) -> None:
        sent = ActivityReport(self.key, event, self.name, details, headers)
        message = Message(body=sent.wire_body(), headers=sent.wire_headers())
        await FakeChannel(self.pool.broker).publish(
            message, exchange=self.pool.names.activity_exchange, routing_key=self.key
        )


@dataclass
class CircuitPool:
    """What survives the leader, and the leader at work. `served`: group, request, and whether it was a probe."""

    clock: VirtualClock
    broker: FakeBroker = field(init=False)
    driver: FakeDriver = field(init=False)
    stack: Stack = field(init=False)
    workers: dict[str, PlayedWorker] = field(default_factory=dict)
    served: list[tuple[str, str, bool]] = field(default_factory=list)
    probes: list[str] = field(default_factory=list)
    fails: bool = True
    loses_probes: bool = False
    lost_reports: float = 0.0
    """The share of completed requests of which no report arrives."""
    binds_late: bool = False
    """New workers get no control messages before `bind`."""
    published: int = 0
    random: Random = field(default_factory=lambda: Random(1))

    make_driver: Callable[..., FakeDriver] = FakeDriver

    def __post_init__(self) -> None:
        self.broker = broker_with_replies(self.clock)
        self.driver = self.make_driver(self.clock, pool=POOL)
        self.driver.on_start = self._started

    @asynccontextmanager
    async def leading(self) -> AsyncIterator[Stack]:
        """The next leader at work; at the end it is killed."""
        async with leading(self.clock, broker=self.broker, driver=self.driver, settings=managed()) as self.stack:
            yield self.stack

    async def begin(self, **document: object) -> None:
        """Route all requests, and use circuits with these settings."""
        await change(self.stack, r=REST)
        configuration = load_circuits(json.dumps(DOCUMENT | document))
        await self.stack.term.routing.circuits.change(configuration, author="me")

    @property
    def names(self):
        return self.stack.names

    def _started(self, worker: FakeWorker) -> None:
        key, name = worker.instance.key, str(worker.instance.worker_id)
        played = PlayedWorker(self, key, name, f"control-{name}", worker.spec.environment.paused)
        self.broker.declare_queue(played.control, {})
        if not self.binds_late:
            self.bind(played)
        self.workers[name] = played
        self._new.append(played)

    def bind(self, worker: PlayedWorker) -> None:
        """From now on the worker gets control messages."""
        for routing_key in (
            self.names.control_group_routing_key(worker.key),
            self.names.control_worker_routing_key(worker.name),
        ):
            self.broker.bind(worker.control, self.names.control_exchange, routing_key)

    _new: list[PlayedWorker] = field(default_factory=list)

    async def publish(self, *keys: str) -> None:
        for key in keys:
            self.published += 1
            name = str(self.published)
            await self.stack.publish(key, name.encode(), correlation_id=name, reply_to=REPLIES, message_id=name)

    async def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP)):
            for worker in self._new:
                await worker.report_state()
            self._new.clear()
            for worker in list(self.workers.values()):
                await worker.turn()
            await self.clock.advance(STEP)
            if self.stack.task.done():
                return

    async def open(self, *keys: str) -> None:
        """Fail one request of each of these groups: the last one opens the circuit."""
        for key in keys:
            await self.publish(key)
            await self.run(2.0)
        assert self.state == "open"

    # --- what is true

    @property
    def circuit(self) -> CircuitView:
        (found,) = self.stack.term.routing.circuits.circuits()
        return found

    @property
    def state(self) -> str:
        return self.circuit.status.name.lower()

    @property
    def paused(self) -> list[str]:
        return sorted(worker.key for worker in self.workers.values() if worker.paused)

    @property
    def answered(self) -> Counter[tuple[str | None, str | None]]:
        return Counter(answers(self.broker))

    def statuses(self) -> dict[str | None, str | None]:
        return dict(answers(self.broker))

    def probed(self) -> list[str]:
        """The groups whose requests passed as probes."""
        return [key for key, _, probe in self.served if probe]
