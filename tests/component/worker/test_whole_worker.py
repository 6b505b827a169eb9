"""A whole worker on a fake broker: probes while it is paused, its cancellation, and connections that are lost."""

import asyncio
import threading
from collections.abc import Callable

import pytest
from worker_bench import PATIENCE, environment, reports_in, until_in_time

from osrdyne.amqp import ConnectionOptions, Message
from osrdyne.protocol.activity import COMPLETED_PROBE_HEADER, EMPTY_PROBE_FIELD, MAX_OUTCOMES, ActivityReport, Event
from osrdyne.protocol.control import Command, ControlMessage, Generation
from osrdyne.protocol.names import Key, PoolNames, WorkerId
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeConnection
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne_worker import App, Call
from osrdyne_worker import worker as module
from osrdyne_worker.bootstrap import build_parts
from osrdyne_worker.runtime.connection import BrokerConnection
from osrdyne_worker.runtime.control import ControlWarnings, listen
from osrdyne_worker.runtime.reports import Completion, Reporter
from osrdyne_worker.worker import Worker

NAMES, WORKER, KEY = PoolNames("p"), WorkerId("w"), Key("k")
QUEUE, REPORTS = NAMES.request_queue(KEY), "reports"
CONTROL_KEY = NAMES.control_group_routing_key(KEY)


@pytest.fixture
def broker(clock):
    """With what the controller has declared; the queue `reports` holds what workers have reported."""
    broker = FakeBroker(clock)
    for queue in (QUEUE, REPORTS):
        broker.declare_queue(queue, {})
    broker.declare_exchange(NAMES.control_exchange, "topic", {})
    broker.declare_exchange(NAMES.activity_exchange, "fanout", {})
    broker.bind(REPORTS, NAMES.activity_exchange, "")
    return broker


class Bench:
    """A worker with one handler, `/p`, which runs in a thread until `go_on` is set."""

    def __init__(self, broker: FakeBroker, clock: VirtualClock) -> None:
        self.broker, self.clock = broker, clock
        self.calls: list[Call] = []
        self.go_on = threading.Event()
        self.app = App()
        self.app.handler("/p")(self.handle)
        self.running: asyncio.Task[None]

    def handle(self, call: Call) -> None:
        self.calls.append(call)
        self.go_on.wait(PATIENCE)

    async def connect(self, options: ConnectionOptions, clock: VirtualClock) -> BrokerConnection:
        connection = FakeConnection(self.broker, options)
        return BrokerConnection(connection, await connection.channel(confirms=True), clock)

    async def start(self, *, paused: bool) -> None:
        parts = build_parts(self.app, environment(paused=paused), clock=self.clock)
        self.running = asyncio.create_task(Worker(parts).run(lambda reason: None))
        await self.reported(lambda report: report.event is Event.READY)

    async def publish_requests(self, count: int) -> None:
        for _ in range(count):
            await self.broker.publish(Message(headers={"x-rpc-path": "/p"}), exchange="", routing_key=QUEUE)

    async def control(self, command: Command, **details: object) -> None:
        body = ControlMessage(command, Generation(0, 0), details).wire_body()
        await self.broker.publish(Message(body=body), exchange=NAMES.control_exchange, routing_key=CONTROL_KEY)

    async def reported(self, condition: Callable[[ActivityReport], bool], times: int = 1) -> list[ActivityReport]:
        """The reports for which the condition holds, once there are so many."""
        async with asyncio.timeout(PATIENCE):
            while len(found := [one for one in reports_in(self.broker, REPORTS) if condition(one)]) < times:
                await self.clock.advance(0.1)
                await asyncio.sleep(0.001)  # handlers run in threads, for which no virtual time passes
        return found


@pytest.fixture
async def bench(broker, clock, monkeypatch):
    bench = Bench(broker, clock)
    monkeypatch.setattr(module, "open_broker_connection", bench.connect)
    yield bench
    bench.go_on.set()
    bench.running.cancel()
    await asyncio.wait({bench.running})


@pytest.mark.parametrize(
    ("probe_ids", "completed"), [("ab", ["a", "b"]), ("aba", ["a", "b"])], ids=["two", "one repeated"]
)
async def test_probes_that_arrive_together_take_a_request_each(bench, probe_ids, completed):
    """A group may be held by the circuits of two routes."""
    bench.go_on.set()
    await bench.start(paused=True)
    await bench.publish_requests(4)
    for probe_id in probe_ids:
        await bench.control(Command.PROBE, id=probe_id)
    found = await bench.reported(lambda report: COMPLETED_PROBE_HEADER in report.headers, times=2)
    assert [report.headers[COMPLETED_PROBE_HEADER] for report in found] == completed
    await bench.clock.advance(5.0)
    assert len(bench.broker.look_up(QUEUE).ready) == 2


async def test_probe_without_a_waiting_request_is_reported(bench):
    await bench.start(paused=True)
    await bench.control(Command.PROBE, id="a")
    [report] = await bench.reported(lambda report: EMPTY_PROBE_FIELD in report.details)
    assert (report.event, report.details[EMPTY_PROBE_FIELD]) == (Event.READY, "a")


@pytest.mark.proves("pooled/requests-released-worker-end")
async def test_cancelled_worker_marks_its_calls_and_gives_back_its_requests(bench):
    """As at a cut-off in a pooled process. No task can be started any more, not even the one that settles an
    interrupted request; and asyncio logs no exception of it."""
    logged: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, found: logged.append(found["message"]))
    await bench.start(paused=False)
    await bench.publish_requests(1)
    await until_in_time(lambda: bench.calls)
    bench.running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bench.running
    assert [call.cancelled for call in bench.calls] == [True]
    assert len(bench.broker.look_up(QUEUE).ready) == 1
    assert logged == []


@pytest.mark.proves("workers/rabbitmq-cancels-worker-s")
@pytest.mark.proves("broker/request-queue-declared-again")
async def test_worker_connects_again_on_request_when_no_request_runs(bench):
    """broker: reattached-consumers: what RabbitMQ has dropped returns with the connection."""
    await bench.start(paused=False)
    await bench.publish_requests(1)
    await bench.reported(lambda report: report.event is Event.BUSY)
    await bench.control(Command.RECONNECT)
    before = bench.broker.count("consume", QUEUE)
    await bench.clock.advance(10.0)
    assert bench.broker.count("consume", QUEUE) == before, "a request runs"
    bench.go_on.set()
    await bench.reported(lambda report: bench.broker.count("consume", QUEUE) > before)
    assert len(bench.calls) == 1


async def test_consumers_that_rabbitmq_cancels_leave_no_channel_open(broker, clock):
    """RabbitMQ cancels a consumer when its queue is deleted, and keeps the channel."""
    connection = FakeConnection(broker, ConnectionOptions("amqp://fake"))
    listens = listen(
        connection,
        environment(requests_queues=()),
        lambda message: None,
        routing_keys=("w",),
        on_listening=lambda: None,
        on_forged=lambda: None,
        warnings=ControlWarnings(),
        clock=clock,
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(listens)
        await clock.settle()
        for _ in range(3):
            broker.delete_queue(NAMES.control_queue(WORKER))
            await clock.advance(2.0)
        assert NAMES.control_queue(WORKER) in broker.queues
        assert [channel.is_closed for channel in connection.channels].count(False) == 1
        await connection.close()
        await clock.advance(2.0)


async def test_report_that_can_name_no_more_requests_is_sent_before_it_is_due(broker, clock):
    """Circuits count every request that a report names."""
    reporter = Reporter(key=KEY, worker_id=WORKER, exchange=NAMES.activity_exchange, clock=clock)
    sending = asyncio.create_task(reporter.send(FakeConnection(broker, ConnectionOptions("amqp://fake"))))

    async def complete(count):
        """The counts of requests in all reports."""
        for number in range(count):
            reporter.received()
            reporter.completed(Completion("ok", "/p", False), duration_ms=1, request=str(number))
        await clock.settle()
        return [one.details["count"] for one in reports_in(broker, REPORTS) if one.event is Event.REQUEST_COMPLETED]

    assert await complete(1) == [1]
    assert await complete(MAX_OUTCOMES - 1) == [1], "it is not due"
    assert await complete(1) == [1, MAX_OUTCOMES]
    sending.cancel()
    await asyncio.wait({sending})
