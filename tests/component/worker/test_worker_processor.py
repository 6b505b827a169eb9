"""The way of a request through the worker, on a fake broker: answers, requests given back, and the races between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from osrdyne.aio.signals import WatchCell
from osrdyne.amqp import Channel, ConnectionOptions, Message
from osrdyne.errors import MessageTooLargeError, QueueFullError
from osrdyne.protocol.activity import COMPLETED_ROUTE_HEADER, Event
from osrdyne.protocol.messages import ROUTE_HEADER
from osrdyne.protocol.names import Key, PoolNames, QueueName, ReplyAddresses, WorkerId
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeConnection
from osrdyne.testing.fakes.broker import Command, FakeBroker
from osrdyne_worker import Answer, App, Call, Context, RequestError
from osrdyne_worker.requests.dispatch import Dispatcher
from osrdyne_worker.requests.intake import Intake
from osrdyne_worker.requests.probe import ProbeIntake
from osrdyne_worker.requests.processor import Answering, Processor
from osrdyne_worker.requests.replies import UNTIL_NO_DEADLINE, ReplySender
from osrdyne_worker.requests.retries import Retries
from osrdyne_worker.runtime.connection import BrokerConnection
from osrdyne_worker.runtime.exit import ExitReason
from osrdyne_worker.runtime.reports import Reporter
from osrdyne_worker.runtime.settings import RuntimeContext, RuntimeSettings

QUEUE, REPLIES, RETRIES = "requests", "replies", "retries"
PATIENCE = 120.0
"""Seconds for anything that must happen."""


class Bench:
    """A processor between a fake request queue and a fake reply queue. The handler `/wait` waits for `go`."""

    def __init__(self, group: asyncio.TaskGroup, threads: ThreadPoolExecutor, settings: RuntimeSettings) -> None:
        self.clock = VirtualClock()
        self.broker = FakeBroker(self.clock)
        self.connection = FakeConnection(self.broker, ConnectionOptions("amqp://fake"))
        self.go = asyncio.Event()
        self.running = asyncio.Event()
        self.calls: list[Call] = []
        self.reporter = Reporter(key=Key("k"), worker_id=WorkerId("w"), exchange="activity", clock=self.clock)
        self.exits: list[ExitReason] = []
        self.runtime = RuntimeContext(settings, self.clock, group.create_task, self.exits.append)
        self.processor = Processor(
            self.runtime,
            Context(Key("k"), worker_id="w"),
            dispatcher=Dispatcher(self.make_app(), threads=threads, side_threads=threads),
            reporter=self.reporter,
            answering=Answering(
                addresses=ReplyAddresses(PoolNames("pool")),
                replies=ReplySender("w", 2**20, self.clock),
                retries=Retries(RETRIES),
            ),
        )

    def make_app(self) -> App:
        app = App()

        @app.handler("/wait")
        async def wait(call: Call) -> str:
            self.calls.append(call)
            self.running.set()
            await self.go.wait()
            return "done"

        @app.handler("/deaf")
        async def deaf(call: Call) -> str:
            self.running.set()
            while not self.go.is_set():
                try:
                    await self.go.wait()
                except asyncio.CancelledError:
                    continue
            return "done"

        @app.handler("/large")
        async def large(call: Call) -> bytes:
            return bytes(2**20 + 1)

        @app.handler("/large_code")
        async def large_code(call: Call) -> Answer:
            return Answer("x", code=2**70)

        @app.handler("/odd_headers")
        async def odd_headers(call: Call) -> Answer:
            return Answer("x", headers={"x-odd": object()})

        @app.handler("/large_headers")
        async def large_headers(call: Call) -> Answer:
            return Answer("x", headers={"x-large": "é" * 100_000})

        @app.handler("/large_progress")
        async def large_progress(call: Call) -> str:
            call.progress(Answer("x", headers={"x-large": "é" * 100_000}))
            return "done"

        @app.handler("/refuse_at_length")
        async def refuse_at_length(call: Call) -> None:
            raise RequestError("🚄" * 50_000)

        @app.handler("/half_a_character")
        async def half_a_character(call: Call) -> None:
            raise RequestError("no \ud800", details={"name": "\ud800"})

        return app

    async def open(self) -> None:
        for queue in (QUEUE, REPLIES):
            self.broker.declare_queue(queue, {})
        self.broker_connection = BrokerConnection(
            self.connection, await self.connection.channel(confirms=True), self.clock
        )
        self.channel: Channel = await self.connection.channel()
        self.consumer = await self.channel.consume(QUEUE, prefetch=10)

    async def take(self, path: str, *, priority: int = 0, correlation_id: str = "c", **headers: object) -> None:
        """A request arrives and is accepted; nothing has run yet."""
        await self.publish(path, correlation_id=correlation_id, **headers)
        self.processor.accept(await self.consumer.get(), priority=priority, broker=self.broker_connection)

    async def publish(self, path: str, *, queue: str = QUEUE, correlation_id: str = "c", **headers: object) -> None:
        message = Message(headers={"x-rpc-path": path, **headers}, correlation_id=correlation_id, reply_to=REPLIES)
        await self.broker.publish(message, exchange="", routing_key=queue)

    def intake(self, queue: QueueName, queues: WatchCell[tuple[QueueName, ...]]) -> Intake:
        return Intake(self.runtime, self.broker_connection, queue, queues=queues, processor=self.processor)

    def statuses(self) -> list[str]:
        stored = self.broker.look_up(REPLIES).ready
        return [bytes(one.message.headers["x-status"]).decode() for one in stored]  # type: ignore[call-overload]

    def reply_texts(self) -> list[str]:
        return [one.message.body.decode() for one in self.broker.look_up(REPLIES).ready]

    def returned(self) -> list[int]:
        """How often each request in the queue has come back as a failure."""
        return [one.returns for one in self.broker.look_up(QUEUE).ready]


@pytest.fixture
async def probes(bench: Bench) -> AsyncIterator[ProbeIntake]:
    await bench.channel.cancel(bench.consumer)
    intake = ProbeIntake(bench.broker_connection, bench.processor)
    yield intake
    intake.close()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with asyncio.TaskGroup() as group:
        with ThreadPoolExecutor(2) as threads:
            bench = Bench(group, threads, RuntimeSettings(stuck_grace=0.0))
            await bench.open()
            yield bench
            bench.go.set()
            await bench.processor.until_idle()
    assert bench.reporter.in_flight == 0


async def test_reply_is_in_its_queue_before_the_request_is_acknowledged(bench: Bench) -> None:
    bench.go.set()
    await bench.take("/wait")
    await bench.processor.until_idle()
    assert bench.statuses() == ["ok"]
    assert [c.name for c in bench.broker.commands if c.name in {"publish", "ack"}][-1:] == ["ack"]


@pytest.mark.parametrize(("exchange", "length"), [(None, None), (RETRIES, 200)], ids=["direct pool", "managed pool"])
async def test_long_name_of_a_route_makes_no_long_report(
    bench: Bench, exchange: str | None, length: int | None
) -> None:
    """In a direct pool it is the caller's word. A report that is too large would end the worker."""
    bench.processor._retries = Retries(exchange)
    bench.go.set()
    await bench.take("/wait", **{ROUTE_HEADER: b"\xff" * 100_000})
    await bench.processor.until_idle()
    [completed] = [one for one in bench.reporter._window.take(1.0) if one.event is Event.REQUEST_COMPLETED]
    route = completed.headers.get(COMPLETED_ROUTE_HEADER)
    assert (route and len(str(route))) == length


async def test_cancel_of_a_running_request_is_answered_once(bench: Bench) -> None:
    await bench.take("/wait")
    await bench.running.wait()
    bench.processor.cancel("c", REPLIES)
    bench.processor.cancel("c", REPLIES)
    await bench.processor.until_idle()
    assert bench.statuses() == ["cancelled"]
    assert bench.calls[0].cancelled


async def test_cancel_before_the_first_step_is_answered(bench: Bench) -> None:
    await bench.take("/wait")
    bench.processor.cancel("c", REPLIES)
    await bench.processor.until_idle()
    assert (bench.statuses(), bench.calls) == (["cancelled"], [])


@pytest.mark.parametrize(("reason", "settled"), [("cancel", ["ack"]), ("requeue", ["nack"])])
@pytest.mark.proves("hostile/message-reaches-queue-pool")
async def test_interrupted_request_with_a_refused_reply_address_is_not_answered(
    bench: Bench, reason: str, settled: list[str]
) -> None:
    """A cancel that arrives before the first step must not send its answer to a queue of the pool's own."""
    bench.processor._addresses = ReplyAddresses(PoolNames("pool"), ("other-",))
    await bench.take("/wait")
    if reason == "cancel":
        bench.processor.cancel("c", REPLIES)
    else:
        bench.processor.requeue()
    await bench.processor.until_idle()
    commands = [command.name for command in bench.broker.commands if command.name in {"ack", "nack", "reject"}]
    assert (bench.statuses(), bench.calls, commands) == ([], [], settled)


async def test_cancel_before_the_request_counts_for_one_request(bench: Bench) -> None:
    bench.go.set()
    bench.processor.cancel("c", REPLIES)
    for _ in range(2):
        await bench.take("/wait")
        await bench.processor.until_idle()
    assert bench.statuses() == ["cancelled", "ok"]


async def test_cancel_after_the_answer_leaves_the_next_request_of_that_name_alone(bench: Bench) -> None:
    bench.go.set()
    await bench.take("/wait")
    await bench.processor.until_idle()
    bench.processor.cancel("c", REPLIES)
    await bench.take("/wait")
    await bench.processor.until_idle()
    assert bench.statuses() == ["ok", "ok"]


async def test_cancel_of_a_request_that_is_being_requeued_is_for_its_next_delivery(bench: Bench) -> None:
    await bench.take("/wait")
    await bench.running.wait()
    bench.processor.requeue(also_running=True)
    bench.processor.cancel("c", REPLIES)
    bench.processor.accept(await bench.consumer.get(), priority=0, broker=bench.broker_connection)
    bench.go.set()
    await bench.processor.until_idle()
    assert (bench.statuses(), len(bench.calls)) == (["cancelled"], 1)


async def test_cancel_of_another_client_changes_nothing(bench: Bench) -> None:
    await bench.take("/wait")
    bench.processor.cancel("c", "other")
    bench.go.set()
    await bench.processor.until_idle()
    assert bench.statuses() == ["ok"]


async def test_cancel_while_the_answer_is_being_sent_comes_too_late(bench: Bench) -> None:
    sending = asyncio.Event()
    send = bench.broker_connection.replies.publish

    async def slow(message: Message, *, exchange: str, routing_key: str, mandatory: bool = False) -> None:
        sending.set()
        await asyncio.sleep(0)
        await send(message, exchange=exchange, routing_key=routing_key)

    bench.broker_connection.replies.publish = slow  # type: ignore[method-assign]
    bench.go.set()
    await bench.take("/wait")
    await sending.wait()
    bench.processor.cancel("c", REPLIES)
    await bench.processor.until_idle()
    assert bench.statuses() == ["ok"]


async def test_waiting_request_is_requeued_without_a_failed_delivery(bench: Bench) -> None:
    await bench.take("/wait")
    await bench.running.wait()
    await bench.take("/wait", correlation_id="second")
    await asyncio.sleep(0)
    await bench.channel.cancel(bench.consumer)
    bench.processor.requeue()
    bench.go.set()
    await bench.processor.until_idle()
    assert (bench.statuses(), bench.returned()) == (["ok"], [0])


async def test_queue_that_is_no_longer_consumed_requeues_only_its_requests(bench: Bench) -> None:
    first, second = QueueName("first"), QueueName("second")
    for queue in (first, second):
        bench.broker.declare_queue(queue, {})
    queues = WatchCell[tuple[QueueName, ...]]((first, second))
    intakes = [asyncio.create_task(bench.intake(queue, queues).run()) for queue in (first, second)]
    await bench.take("/wait")
    await until(bench.running.is_set)
    for queue in (first, second):
        await bench.publish("/wait", queue=queue)
    await until(lambda: bench.processor.in_flight == 3)
    queues.set((QueueName("third"), second))
    await until(lambda: bench.processor.in_flight == 2)
    assert [len(bench.broker.look_up(queue).ready) for queue in (first, second)] == [1, 0]
    bench.go.set()
    await bench.processor.until_idle()
    for intake in intakes:
        intake.cancel()
    await asyncio.wait(intakes)
    assert ("nack", second) not in [(command.name, command.target) for command in bench.broker.commands]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0)


async def test_running_request_is_requeued_on_command(bench: Bench) -> None:
    await bench.take("/wait")
    await bench.running.wait()
    await bench.channel.cancel(bench.consumer)
    bench.processor.requeue(also_running=True)
    await bench.processor.until_idle()
    assert (bench.statuses(), len(bench.returned())) == ([], 1)


async def test_lost_channel_ends_the_work_without_an_answer(bench: Bench) -> None:
    await bench.take("/wait")
    await bench.running.wait()
    await bench.channel.close()
    bench.processor.lose(bench.channel)
    await bench.processor.until_idle()
    assert (bench.statuses(), bench.calls[0].cancelled) == ([], True)


async def test_connection_lost_during_the_answer_does_not_end_the_worker(bench: Bench) -> None:
    bench.go.set()
    await bench.take("/wait")
    bench.connection.cut()
    await bench.processor.until_idle()
    assert bench.statuses() == []


async def test_handler_that_ignores_its_cancel_is_answered_and_ends_the_worker(bench: Bench) -> None:
    await bench.take("/deaf")
    await bench.running.wait()
    bench.processor.cancel("c", REPLIES)
    await until(lambda: bool(bench.exits))
    assert bench.statuses() == ["cancelled"]
    bench.go.set()
    await bench.processor.until_idle()
    assert bench.statuses() == ["cancelled"]


@pytest.mark.parametrize(("path", "code"), [("/large", 413), ("/large_code", 500)])
async def test_report_has_the_status_and_code_that_the_caller_got(bench: Bench, path: str, code: int) -> None:
    """A report with a code that AMQP cannot carry would end the worker."""
    encode_headers(bench)
    await bench.take(path)
    await bench.processor.until_idle()
    [completed] = [one for one in bench.reporter._window.take(1.0) if one.event is Event.REQUEST_COMPLETED]
    assert (bench.statuses(), completed.headers["x-status"], completed.headers["x-code"]) == (["error"], b"error", code)


async def test_failed_report_does_not_settle_the_request_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **named: object) -> None:
        bench.reporter.dropped()
        raise RuntimeError("the report failed")

    monkeypatch.setattr(bench.reporter, "completed", fail)
    bench.go.set()
    await bench.take("/wait")
    await bench.processor.until_idle()
    assert (bench.statuses(), bench.broker.count("ack"), bench.broker.count("reject")) == (["ok"], 1, 0)
    assert not bench.channel.is_closed


async def test_reason_to_exit_repeats_little_of_a_long_path(bench: Bench) -> None:
    dispatcher = bench.processor._dispatcher
    dispatcher._default = dispatcher._targets["/deaf"]
    await bench.take("/" + "nowhere" * 10_000)
    await bench.running.wait()
    bench.processor.cancel("c", REPLIES)
    await until(lambda: bool(bench.exits))
    assert len(str(bench.exits[0])) < 400


async def test_headers_that_amqp_cannot_carry_are_an_error(bench: Bench) -> None:
    publish = bench.broker_connection.replies.publish

    async def strict(message: Message, *, exchange: str, routing_key: str, mandatory: bool = False) -> None:
        if "x-odd" in message.headers:
            raise TypeError("object is not supported")
        await publish(message, exchange=exchange, routing_key=routing_key)

    bench.broker_connection.replies.publish = strict  # type: ignore[method-assign]
    await bench.take("/odd_headers")
    await bench.processor.until_idle()
    assert bench.statuses() == ["error"]


async def test_headers_larger_than_a_frame_are_an_error_and_the_request_is_done(bench: Bench) -> None:
    limit_headers(bench)
    await bench.take("/large_headers")
    await bench.processor.until_idle()
    assert (bench.statuses(), bench.broker.look_up(QUEUE).messages) == (["error"], 0)
    assert "headers of the answer are too large" in bench.reply_texts()[0]


@pytest.mark.parametrize("path", ["/refuse_at_length", "/half_a_character", "/" + "nowhere" * 15_000])
async def test_refusal_of_any_length_is_answered_as_it_is(bench: Bench, path: str) -> None:
    limit_headers(bench)
    await bench.take(path)
    await bench.processor.until_idle()
    assert (bench.statuses(), bench.broker.look_up(QUEUE).messages) == (["error"], 0)
    assert "headers of the answer" not in bench.reply_texts()[0]


async def test_progress_with_headers_that_are_too_large_is_not_the_last_answer(bench: Bench) -> None:
    limit_headers(bench)
    await bench.take("/large_progress", **{"x-progress": True})
    await bench.processor.until_idle()
    assert bench.statuses() == ["error", "ok"]
    assert bench.broker.look_up(REPLIES).ready[0].message.headers["x-non-terminating-response"] is True


def encode_headers(bench: Bench) -> None:
    """As the real channel does: headers that AMQP cannot carry raise an error of the encoder."""
    publish = bench.broker_connection.replies.publish

    async def strict(message: Message, *, exchange: str, routing_key: str, mandatory: bool = False) -> None:
        message.properties().marshal()
        await publish(message, exchange=exchange, routing_key=routing_key)

    bench.broker_connection.replies.publish = strict  # type: ignore[method-assign]


def limit_headers(bench: Bench) -> None:
    """As the real channel does: nothing is sent whose headers do not fit into a frame, or are not UTF-8."""
    publish = bench.broker_connection.replies.publish

    async def strict(message: Message, *, exchange: str, routing_key: str, mandatory: bool = False) -> None:
        if len(message.properties().marshal()) > 100_000:
            raise MessageTooLargeError("The headers of the message have 131073 bytes.")
        await publish(message, exchange=exchange, routing_key=routing_key)

    bench.broker_connection.replies.publish = strict  # type: ignore[method-assign]


async def test_full_reply_queue_is_tried_for_minutes_then_the_request_goes_back_as_a_failure(bench: Bench) -> None:
    attempts = []

    async def refuse(message: Message, *, exchange: str, routing_key: str, mandatory: bool = False) -> None:
        attempts.append(routing_key)
        raise QueueFullError("full")

    bench.broker_connection.replies.publish = refuse  # type: ignore[method-assign]
    bench.go.set()
    await bench.take("/wait")
    await bench.channel.cancel(bench.consumer)
    await bench.clock.advance(UNTIL_NO_DEADLINE - 10.0)
    assert (bench.returned(), bench.processor.in_flight) == ([], 1)
    await bench.clock.advance(20.0)
    await bench.processor.until_idle()
    assert (set(attempts), bench.returned()) == ({REPLIES}, [1])


async def test_expired_request_is_answered_and_not_run(bench: Bench) -> None:
    message = Message(headers={"x-rpc-path": "/wait", "x-deadline": 1}, reply_to=REPLIES)
    await bench.broker.publish(message, exchange="", routing_key=QUEUE)
    bench.processor.accept(await bench.consumer.get(), priority=0, broker=bench.broker_connection)
    await bench.processor.until_idle()
    assert (bench.statuses(), bench.calls) == (["expired"], [])


@pytest.mark.parametrize("steps", range(12))
async def test_interruption_at_every_step_settles_the_request_once(bench: Bench, steps: int) -> None:
    """Whenever a cancel comes, the request is answered exactly once and leaves the queue."""
    bench.go.set()
    await bench.take("/wait")
    for _ in range(steps):
        await asyncio.sleep(0)
    bench.processor.cancel("c", REPLIES)
    await bench.processor.until_idle()
    assert bench.statuses() in (["ok"], ["cancelled"])
    assert bench.broker.look_up(QUEUE).messages == 0


async def test_handler_that_was_answered_for_does_not_answer_a_second_time(bench: Bench) -> None:
    """Also when it ends while the answer is on its way."""

    async def end_meanwhile(command: Command) -> None:
        if command == ("publish", REPLIES, False):
            bench.go.set()
            for _ in range(20):
                await asyncio.sleep(0)

    await bench.take("/deaf")
    await bench.running.wait()
    bench.broker.hook = end_meanwhile
    bench.processor.cancel("c", REPLIES)
    await bench.processor.until_idle()
    assert (bench.statuses(), bench.broker.count("ack")) == (["cancelled"], 1)


async def test_probe_takes_exactly_one_request_and_its_report_repeats_the_id(bench: Bench, probes: ProbeIntake) -> None:
    await bench.publish("/wait", correlation_id="1")
    await bench.publish("/wait", correlation_id="2")
    bench.go.set()
    assert await probes.take_one("p", [QueueName("missing"), QueueName(QUEUE)])
    await bench.processor.until_idle()
    assert (bench.statuses(), len(bench.broker.look_up(QUEUE).ready)) == (["ok"], 1)
    [completed] = [one for one in bench.reporter._window.take(1.0) if one.event is Event.REQUEST_COMPLETED]
    assert (completed.headers["x-probe"], completed.details["count"]) == ("p", 1)


async def test_probe_without_a_request_says_so(bench: Bench, probes: ProbeIntake) -> None:
    assert not await probes.take_one("p", [QueueName(QUEUE)])
    assert bench.processor.in_flight == 0


async def test_probe_of_a_lost_connection_returns_to_its_queue(bench: Bench, probes: ProbeIntake) -> None:
    await bench.publish("/wait")
    assert await probes.take_one("p", [QueueName(QUEUE)])
    await bench.running.wait()
    probes.close()
    await bench.processor.until_idle()
    await asyncio.sleep(0)
    assert (bench.statuses(), bench.broker.look_up(QUEUE).messages) == ([], 1)
