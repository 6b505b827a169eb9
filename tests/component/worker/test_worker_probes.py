"""A paused worker and the probes of the controller, on a fake broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from osrdyne.amqp import ConnectionOptions, Message
from osrdyne.protocol.activity import COMPLETED_PROBE_HEADER, EMPTY_PROBE_FIELD, Event, report_from_wire
from osrdyne.protocol.control import Command, ControlMessage, Generation
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.names import Key, QueueName, WorkerId
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeConnection
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne_worker import App, Call
from osrdyne_worker import worker as module
from osrdyne_worker.bootstrap import build_parts
from osrdyne_worker.runtime.connection import BrokerConnection
from osrdyne_worker.worker import Worker

QUEUE = QueueName("p-req-k")
ENVIRONMENT = WorkerEnvironment(
    worker_id=WorkerId("w"),
    key=Key("k"),
    pool="p",
    amqp_uri="amqp://fake",
    requests_queues=(QUEUE,),
    activity_exchange="activity",
    control_exchange="control",
    paused=True,
)


class Bench:
    """A paused worker on a fake broker; the queue `reports` holds what it has published."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.broker = FakeBroker(self.clock)
        self.worker = Worker(build_parts(make_app(), ENVIRONMENT, clock=self.clock))

    async def connect(self, options: ConnectionOptions, clock: VirtualClock) -> BrokerConnection:
        connection = FakeConnection(self.broker, options)
        return BrokerConnection(connection, await connection.channel(confirms=True), clock)

    async def publish_request(self) -> None:
        await self.broker.publish(Message(headers={"x-rpc-path": "/p"}), exchange="", routing_key=QUEUE)

    def request_probe(self, probe_id: str) -> None:
        self.worker._handle_control(ControlMessage(Command.PROBE, Generation(0, 0), {"id": probe_id}))

    async def probes(self) -> dict[Event, list[object]]:
        """The probes in the reports of the worker: those with an outcome, and those for which no request waited."""
        found: dict[Event, list[object]] = {Event.REQUEST_COMPLETED: [], Event.READY: []}
        await self.clock.settle()
        self.worker._reporter.flush()
        await self.clock.settle()
        for stored in self.broker.look_up("reports").ready:
            report = report_from_wire(
                routing_key=stored.routing_key, headers=stored.message.headers, body=stored.message.body
            )
            assert report is not None
            for probe in (report.headers.get(COMPLETED_PROBE_HEADER), report.details.get(EMPTY_PROBE_FIELD)):
                if probe is not None:
                    found[report.event].append(probe)
        return found


def make_app() -> App:
    app = App()

    @app.handler("/p")
    async def handle(call: Call) -> str:
        return "done"

    return app


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    bench = Bench()
    monkeypatch.setattr(module, "open_broker_connection", bench.connect)
    for queue in (QUEUE, "reports"):
        bench.broker.declare_queue(queue, {})
    bench.broker.declare_exchange("control", "topic", {})
    bench.broker.declare_exchange("activity", "fanout", {})
    bench.broker.bind("reports", "activity", "")
    running = asyncio.create_task(bench.worker.run(lambda reason: None))
    async with asyncio.timeout(120.0):
        while not bench.worker._ready:
            await asyncio.sleep(0)
    await bench.clock.settle()
    yield bench
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_probes_that_arrive_together_take_a_request_each(bench: Bench) -> None:
    """A group may be held by the circuits of two routes."""
    for _ in range(3):
        await bench.publish_request()
    bench.request_probe("a")
    bench.request_probe("b")
    found = await bench.probes()
    assert found[Event.REQUEST_COMPLETED] == ["a", "b"]
    assert len(bench.broker.look_up(QUEUE).ready) == 1


async def test_repeated_probe_takes_one_request(bench: Bench) -> None:
    for _ in range(3):
        await bench.publish_request()
    for probe_id in ("a", "b", "a"):
        bench.request_probe(probe_id)
    await bench.probes()
    assert len(bench.broker.look_up(QUEUE).ready) == 1


async def test_probe_without_a_waiting_request_is_reported(bench: Bench) -> None:
    bench.request_probe("a")
    assert (await bench.probes())[Event.READY] == ["a"]
