"""A worker whose `run` is cancelled while it has requests, as at a cut-off in a pooled process. On a fake broker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from osrdyne.amqp import ConnectionOptions, Message
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
PATIENCE = 120.0
ENVIRONMENT = WorkerEnvironment(
    worker_id=WorkerId("w"),
    key=Key("k"),
    pool="p",
    amqp_uri="amqp://fake",
    requests_queues=(QUEUE,),
    activity_exchange="activity",
    control_exchange="control",
)


class Bench:
    """A worker with one thread handler, which notes its call and runs until `go_on` is set."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.broker = FakeBroker(self.clock)
        self.calls: list[Call] = []
        self.began, self.go_on = threading.Event(), threading.Event()
        self.failures: list[str] = []
        """What asyncio has logged: exceptions in callbacks, and of tasks that nothing has awaited."""
        app = App()

        @app.handler("/p")
        def handle(call: Call) -> None:
            self.calls.append(call)
            self.began.set()
            self.go_on.wait(PATIENCE)

        self.worker = Worker(build_parts(app, ENVIRONMENT, clock=self.clock))
        self.running = asyncio.create_task(self.worker.run(lambda reason: None))

    async def connect(self, options: ConnectionOptions, clock: VirtualClock) -> BrokerConnection:
        connection = FakeConnection(self.broker, options)
        return BrokerConnection(connection, await connection.channel(confirms=True), clock)

    async def publish_request(self) -> None:
        await self.broker.publish(Message(headers={"x-rpc-path": "/p"}), exchange="", routing_key=QUEUE)
        async with asyncio.timeout(PATIENCE):
            while not self.began.is_set():
                await asyncio.sleep(0.001)


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    bench = Bench()
    monkeypatch.setattr(module, "open_broker_connection", bench.connect)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, found: bench.failures.append(found["message"]))
    bench.broker.declare_queue(QUEUE, {})
    bench.broker.declare_exchange("control", "topic", {})
    bench.broker.declare_exchange("activity", "fanout", {})
    yield bench
    bench.go_on.set()
    bench.running.cancel()
    await asyncio.wait({bench.running})


@pytest.mark.proves("pooled/requests-released-worker-end")
async def test_cancelled_worker_marks_its_calls_and_gives_back_its_requests(bench: Bench) -> None:
    """No task can be started any more, not even the one that settles an interrupted request."""
    await bench.publish_request()
    bench.running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bench.running
    assert [call.cancelled for call in bench.calls] == [True]
    assert len(bench.broker.look_up(QUEUE).ready) == 1
    assert bench.failures == []


async def test_task_of_a_cancelled_worker_does_not_begin(bench: Bench) -> None:
    began = []

    async def task() -> None:
        began.append(True)

    await bench.publish_request()
    bench.running.cancel()
    await asyncio.wait({bench.running})
    await asyncio.wait({bench.worker._runtime.spawn(task())})
    assert began == []
