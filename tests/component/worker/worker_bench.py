"""A worker's processor on a fake broker: it takes requests from one queue and answers to another."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import pytest
from worker_environments import worker_environment

from osrdyne.aio.signals import WatchCell
from osrdyne.amqp import Channel, ConnectionOptions, Message
from osrdyne.protocol.activity import ActivityReport, Event, report_from_wire
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.names import Key, PoolNames, QueueName, ReplyAddresses, WorkerId
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeConnection
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne_worker import App, Call, Context
from osrdyne_worker.requests.dispatch import Dispatcher
from osrdyne_worker.requests.intake import Intake
from osrdyne_worker.requests.processor import Answering, Processor
from osrdyne_worker.requests.replies import ReplySender
from osrdyne_worker.requests.retries import Retries
from osrdyne_worker.requests.scheduling.suspects import SuspectGate
from osrdyne_worker.runtime.connection import BrokerConnection
from osrdyne_worker.runtime.exit import ExitReason
from osrdyne_worker.runtime.reports import Reporter
from osrdyne_worker.runtime.settings import RuntimeContext, RuntimeSettings

QUEUE, REPLIES, RETRIES, WAIT, ACTIVITY = "requests", "replies", "retries", "wait", "activity"
LONG_PATH = "/deaf" * 20_000
PATIENCE = 120.0
"""Seconds for anything that must happen."""
B = TypeVar("B", bound="Bench")


class Bench:
    """The handler `/wait` waits for `go`; `/deaf` does so too, and ignores that it is cancelled.

    Handlers of subclasses that block a thread wait for `released`.
    """

    prefetch = 10
    retry_exchange: str | None = RETRIES
    """The exchange of retries; None: as in a direct pool."""
    addresses = ReplyAddresses(PoolNames("pool"))

    def __init__(self, group: asyncio.TaskGroup, threads: ThreadPoolExecutor, settings: RuntimeSettings) -> None:
        self.clock = VirtualClock()
        self.broker = FakeBroker(self.clock)
        self.connection = FakeConnection(self.broker, ConnectionOptions("amqp://fake"))
        self.go, self.running = asyncio.Event(), asyncio.Event()
        self.released = threading.Event()
        self.calls: list[Call] = []
        self.exits: list[ExitReason] = []
        self.intakes: list[asyncio.Task[None]] = []
        self.suspect_gate = SuspectGate()
        self.reporter = Reporter(key=Key("k"), worker_id=WorkerId("w"), exchange=ACTIVITY, clock=self.clock)
        self.runtime = RuntimeContext(settings, self.clock, group.create_task, self.exits.append)
        self.processor = Processor(
            self.runtime,
            Context(Key("k"), worker_id="w"),
            dispatcher=Dispatcher(self.make_app(), threads=threads, side_threads=threads),
            reporter=self.reporter,
            answering=Answering(
                addresses=self.addresses,
                replies=ReplySender("w", 2**20, self.clock),
                retries=Retries(self.retry_exchange),
            ),
            suspect_gate=self.suspect_gate,
            on_alone=self.alone_changed,
        )

    def alone_changed(self) -> None:
        """A suspect begins or ends to run alone."""

    def make_app(self) -> App:
        app = App()

        @app.handler("/wait")
        async def wait(call: Call) -> str:
            self.calls.append(call)
            self.running.set()
            await self.go.wait()
            return "done"

        @app.handler("/deaf")
        @app.handler(LONG_PATH)
        async def deaf(call: Call) -> str:
            self.running.set()
            while not self.go.is_set():
                try:
                    await self.go.wait()
                except asyncio.CancelledError:
                    continue
            return "done"

        return app

    async def open(self) -> None:
        for queue in (QUEUE, REPLIES):
            self.broker.declare_queue(queue, {})
        await self.connect()

    async def connect(self) -> None:
        confirmed = await self.connection.channel(confirms=True)
        self.broker_connection = BrokerConnection(self.connection, confirmed, self.clock)
        self.channel: Channel = await self.connection.channel()
        self.consumer = await self.channel.consume(QUEUE, prefetch=self.prefetch)

    def declare_wait(self) -> None:
        """The queue in which requests wait that are tried again."""
        self.broker.declare_exchange(RETRIES, "direct", {})
        self.broker.declare_queue(WAIT, {})
        self.broker.bind(WAIT, RETRIES, QUEUE)

    # -- requests

    async def publish(
        self,
        path: str,
        *,
        queue: str = QUEUE,
        correlation_id: str = "c",
        body: bytes = b"",
        expiration: str | None = None,
        **headers: object,
    ) -> None:
        message = Message(
            body=body,
            headers={"x-rpc-path": path, **headers},
            correlation_id=correlation_id,
            reply_to=REPLIES,
            expiration=expiration,
            timestamp=datetime.fromtimestamp(self.clock.time(), tz=UTC),
        )
        await self.broker.publish(message, exchange="", routing_key=queue)

    async def accept(self, *, priority: int = 0) -> None:
        self.processor.accept(await self.consumer.get(), priority=priority, broker=self.broker_connection)

    async def take(self, path: str, *, priority: int = 0, **request: Any) -> None:
        """A request arrives and is accepted; nothing has run yet."""
        await self.publish(path, **request)
        await self.accept(priority=priority)

    async def run(self, path: str, **request: Any) -> None:
        """A request arrives, and is done when no request is in the worker."""
        await self.take(path, **request)
        await self.processor.until_idle()

    async def begin(self, path: str, **request: Any) -> None:
        """A request arrives, and its handler begins."""
        await self.take(path, **request)
        await self.running.wait()

    async def take_again(self, path: str = "/wait", **request: Any) -> None:
        """A request arrives again whose delivery has failed once."""
        await self.publish(path, **request)
        await (await self.consumer.get()).reject()
        await self.accept()

    async def hold_slot(self) -> None:
        """Requests that come from now on wait until `go` is set."""
        await self.begin("/wait", correlation_id="holds the slot")

    def consume(self, queue: QueueName, queues: WatchCell[tuple[QueueName, ...]]) -> None:
        intake = Intake(self.runtime, self.broker_connection, queue, queues=queues, processor=self.processor)
        self.intakes.append(asyncio.create_task(intake.run()))

    async def stop_intakes(self) -> None:
        for intake in self.intakes:
            intake.cancel()
        await asyncio.gather(*self.intakes, return_exceptions=True)

    @asynccontextmanager
    async def consuming(self, *names: str) -> AsyncIterator[WatchCell[tuple[QueueName, ...]]]:
        """Consume new queues, the first with the highest priority, as a worker does."""
        queues = tuple(map(QueueName, names))
        for queue in queues:
            if queue not in self.broker.queues:
                self.broker.declare_queue(queue, {})
        cell = WatchCell[tuple[QueueName, ...]](queues)
        for queue in queues:
            self.consume(queue, cell)
        yield cell
        await self.stop_intakes()

    def returned(self) -> list[int]:
        """How often each request in the queue has come back as a failure."""
        return [one.returns for one in self.broker.look_up(QUEUE).ready]

    def unfinished(self, queue: str = QUEUE) -> int:
        """The requests of a queue that are not acknowledged."""
        return self.broker.look_up(queue).messages

    def settlements(self) -> list[str]:
        return [command.name for command in self.broker.commands if command.name in {"ack", "nack", "reject"}]

    # -- replies

    def replies(self) -> list[Message]:
        return [one.message for one in self.broker.look_up(REPLIES).ready]

    def statuses(self) -> list[str]:
        return [status_of(one) for one in self.replies()]

    def by_name(self) -> dict[str | None, str]:
        """The status of each reply, by the correlation id of its request."""
        return {one.correlation_id: status_of(one) for one in self.replies()}

    def bodies(self) -> dict[str | None, str]:
        return {one.correlation_id: one.body.decode() for one in self.replies()}

    def around_replies(
        self,
        before: Callable[[Message], Awaitable[None]] | None = None,
        after: Callable[[Message], Awaitable[None]] | None = None,
    ) -> None:
        """Call these before and after each reply is published."""
        publish = self.broker_connection.replies.publish

        async def wrapped(message: Message, **place: Any) -> None:
            if before is not None:
                await before(message)
            await publish(message, **place)
            if after is not None:
                await after(message)

        self.broker_connection.replies.publish = wrapped  # type: ignore[method-assign,assignment]

    @asynccontextmanager
    async def reporting(self) -> AsyncIterator[Callable[[], list[ActivityReport]]]:
        """Send reports; the reports that the controller would read."""
        self.broker.declare_queue(ACTIVITY, {})
        self.broker.declare_exchange(ACTIVITY, "fanout", {})
        self.broker.bind(ACTIVITY, ACTIVITY, "k")
        sending = asyncio.create_task(self.reporter.send(self.connection))
        await self.clock.settle()

        yield lambda: reports_in(self.broker, ACTIVITY)
        sending.cancel()
        await asyncio.wait({sending})

    async def completed(self) -> ActivityReport:
        """The only report of the end of a request, once the worker is idle."""
        async with self.reporting() as reports:
            await self.processor.until_idle()
            self.reporter.flush()
            await self.clock.settle()
            [found] = [one for one in reports() if one.event is Event.REQUEST_COMPLETED]
        return found

    # -- the end

    async def finish(self) -> None:
        """Let all handlers end, and wait until no request is in the worker."""
        self.go.set()
        self.released.set()
        async with asyncio.timeout(PATIENCE):
            await self.processor.until_idle()

    def assert_nothing_is_left(self) -> None:
        assert self.reporter.in_flight == 0
        assert self.processor.free_slots == self.runtime.settings.concurrency


class Reloads:
    """Data that the coroutine function `reload` loads; the application does not name its versions."""

    names_versions = False

    def __init__(self, reload: Callable[[int | None], Awaitable[Context]]) -> None:
        self.reload = reload

    async def newest_version(self) -> int | None:
        return None

    async def unload(self, context: Context) -> None:
        pass


def environment(worker_id: str = "w", key: str = "k", **changes: Any) -> WorkerEnvironment:
    """That of a worker with one queue."""
    plain: dict[str, Any] = {"requests_queues": (PoolNames("p").request_queue(Key(key)),), "config": {}, "poison": {}}
    return worker_environment(worker_id, key, **{**plain, **changes})


def reports_in(broker: FakeBroker, queue: str) -> list[ActivityReport]:
    stored = [(one.routing_key, one.message) for one in broker.look_up(queue).ready]
    found = [report_from_wire(routing_key=key, headers=one.headers, body=one.body) for key, one in stored]
    return [one for one in found if one is not None]


def status_of(message: Message) -> str:
    return bytes(message.headers["x-status"]).decode()  # type: ignore[call-overload,no-any-return]


@asynccontextmanager
async def serving(kind: type[B], **settings: Any) -> AsyncIterator[B]:
    """A bench at work. At the end its handlers finish, and nothing may be left."""
    async with asyncio.TaskGroup() as group:
        with ThreadPoolExecutor(4) as threads:
            bench = kind(group, threads, RuntimeSettings(**{"stuck_grace": 3600.0, **settings}))
            await bench.open()
            yield bench
            await bench.finish()
    bench.assert_nothing_is_left()


def bench_fixture(kind: type[Bench], **settings: Any) -> Any:
    """The fixture `bench` of a file. A test may have another kind."""

    @pytest.fixture
    async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
        async with serving(getattr(request, "param", kind), **settings) as bench:
            yield bench

    return bench


async def until(condition: Callable[[], object], *, pause: float = 0.0) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(pause)


until_in_time = partial(until, pause=0.001)
"""As `until`, for a condition that real time brings about: deadlines are timers of the event loop."""
