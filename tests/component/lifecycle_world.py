"""A pool in memory with clients, workers and one leader after another, and a ledger of what became of every request.

The leaders are real (session, term, loops, processors); broker, driver and clock are those of `osrdyne.testing`.
Workers serve by themselves; a test makes them hold a request, die, or die unnoticed by the broker.
"""

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum

from osrdyne.amqp import Message
from osrdyne.config.models import LifecycleSettings, RequestSettings, Settings
from osrdyne.errors import BrokerError
from osrdyne.protocol.activity import ActivityReport, Event
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.drivers import FakeDriver, FakeWorker
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.broker import Command, FakeBroker
from osrdyne.testing.fakes.stack import POOL, Stack, make_stack, settings_for

NAMES = PoolNames(POOL)
KEY = Key("a")
QUEUE = NAMES.request_queue(KEY)
REPLIES = "replies"

Action = Callable[[], Awaitable[object] | None]


class Fault(StrEnum):
    """What can be wrong when a history is over; the words of the model's expectations."""

    LOST = "lost"
    NO_OUTCOME = "no-outcome"
    BUSY_STOPPED = "busy-stopped"
    WRONG_END = "wrong-end"


def quick() -> Settings:
    """Unbound after 20 s, to be judged after 10 s more. No request is excused by its age."""
    settings = settings_for(LifecycleSettings(unbind_delay=20.0, stop_delay=10.0, settle_delay=10.0))
    return settings.model_copy(update={"requests": RequestSettings(ttl=1_000_000.0)})


class PoolWorld:
    """What survives leaders, and everything that goes on beside them."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.broker = FakeBroker(self.clock)
        self.broker.hook = self._hook
        self.broker.declare_queue(REPLIES, {})
        self.driver = FakeDriver(self.clock, pool=POOL)
        self.driver.on_start = self._begin
        self.leaders: list[Stack] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def _hook(self, command: Command) -> None:
        """At each command, before it takes effect and after."""

    def _begin(self, fake: FakeWorker) -> None:
        """A worker was started."""

    def do(self, work: Awaitable[None]) -> None:
        """Let something go on beside the history; `close` ends it."""
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)

    async def close(self) -> None:
        tasks = [*self._tasks, *(stack.task for stack in self.leaders)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class World(PoolWorld):
    """A pool of one key and everybody around it."""

    def __init__(self) -> None:
        super().__init__()
        self.confirmed: set[bytes] = set()
        self.served: set[bytes] = set()
        self.interrupted: set[bytes] = set()
        self.hold: set[bytes] = set()
        """Requests that a worker takes and does not finish before `release`."""
        self.cut_off: list[FakeChannel] = []
        """Channels of dead workers that the broker has not noticed."""
        self._channel = FakeChannel(self.broker)
        self.unnoticed = False
        """Whether the broker is blind to the end of workers for now."""
        self._released = asyncio.Event()
        self._expected: list[tuple[Callable[[Command], bool], Action]] = []

    # --- making things happen

    def once(self, matches: Callable[[Command], bool], action: Action) -> None:
        """Carry out `action` at the first command that matches, which waits for it."""
        self._expected.append((matches, action))

    async def _hook(self, command: Command) -> None:
        for entry in self._expected:
            matches, action = entry
            if matches(command):
                self._expected.remove(entry)
                if (done := action()) is not None:
                    await done
                return

    async def pass_on(self) -> None:
        """Let whatever has just been begun take its first steps."""
        for _ in range(10):
            await self.clock.sleep(0)

    # --- clients

    def send(self, body: bytes) -> None:
        """Publish a request; it is in the ledger once it is confirmed."""
        self.do(self._publish(body))

    async def _publish(self, body: bytes) -> None:
        message = Message(body=body, reply_to=REPLIES, correlation_id=body.decode())
        channel = FakeChannel(self.broker, confirms=True)
        await channel.publish(message, exchange=NAMES.requests_exchange, routing_key=KEY, mandatory=True)
        self.confirmed.add(body)

    # --- workers

    def _begin(self, fake: FakeWorker) -> None:
        self.do(self._live(fake))

    async def _live(self, worker: FakeWorker) -> None:
        serving = asyncio.ensure_future(self._serve(worker))
        try:
            await worker.gone.wait()
        finally:
            serving.cancel()
        if self.unnoticed:
            self.cut_off.append(self._channel)
        else:
            self._channel.end(None)

    async def _serve(self, worker: FakeWorker) -> None:
        """Consume, and connect anew when that ends."""
        while True:
            self._channel = FakeChannel(self.broker)
            await self._consume(self._channel, worker)
            await self.clock.sleep(1.0)

    async def _consume(self, channel: FakeChannel, worker: FakeWorker) -> None:
        while NAMES.request_queue(worker.spec.key) not in self.broker.queues:
            await self.clock.sleep(1.0)
        try:
            consumer = await channel.consume(NAMES.request_queue(worker.spec.key), prefetch=1)
            async for delivery in consumer:
                if delivery.body in self.hold:
                    await self._hold_on(delivery.body, worker)
                self.served.add(delivery.body)
                await delivery.ack()
        except BrokerError:
            return  # the queue is gone under the worker, or its connection

    async def _hold_on(self, body: bytes, worker: FakeWorker) -> None:
        try:
            await self._released.wait()
        except asyncio.CancelledError:
            if worker.instance.exit is None or worker.instance.exit.code != 1:  # it did not end by itself
                self.interrupted.add(body)
            raise

    def release(self) -> None:
        """Let the workers finish what they hold."""
        self._released.set()

    def crash(self, *, unnoticed: bool = False) -> None:
        """The worker ends by itself."""
        self.unnoticed = unnoticed
        self.driver.exit_instance(self.worker.instance.instance_id, code=1)

    def cut_worker(self) -> None:
        """The worker loses its connection, and lives on."""
        self._channel.end(None)

    def report(self) -> None:
        """The worker reports that it is busy; this may be late."""
        report = ActivityReport(KEY, Event.BUSY, "w", {"in_flight": 1})
        message = Message(body=report.wire_body(), headers=report.wire_headers())
        self.do(FakeChannel(self.broker).publish(message, exchange=NAMES.activity_exchange, routing_key=KEY))

    @property
    def worker(self) -> FakeWorker:
        return self.driver.workers_of(KEY)[-1]

    def notice(self) -> None:
        """The broker gives up the connections of dead workers."""
        self.unnoticed = False
        for channel in self.cut_off:
            channel.end(None)

    # --- leaders

    @property
    def leader(self) -> Stack:
        return self.leaders[-1]

    async def lead(self) -> None:
        """The next leader takes over."""
        stack = make_stack(self.clock, broker=self.broker, driver=self.driver, settings=quick())
        stack.task = asyncio.create_task(stack.lead())
        self.leaders.append(stack)
        await self.clock.settle()
        while not stack.leading.is_set():
            assert not stack.task.done(), stack.task
            await self.clock.advance(1)

    async def kill(self) -> None:
        """The leader is killed: nothing is finished, nothing closed in order."""
        self.cut()
        self.leader.task.cancel()
        await asyncio.wait({self.leader.task})
        await self.clock.settle()

    def cut(self) -> None:
        """The connections of the leader are lost."""
        for connection in self.leader.connections:
            connection.cut()

    def retire(self) -> bool:
        """The group is to end as soon as that is safe, as after its idle times."""
        return self.leader.retire(KEY)

    # --- the end

    async def rest(self, seconds: float = 3600.0) -> None:
        """Let every fault pass, and time enough for everything to come to its end."""
        for _ in range(3):
            self.notice()
            self.release()
            self.broker.release_dead_letters()
            if self.leader.task.done():
                await self.lead()
            await self.clock.advance(seconds)

    def faults(self) -> set[Fault]:
        """What is wrong, once everything has come to rest: nothing may be left over then."""
        kept = {body for queue in self.broker.queues.values() for body in queue.bodies()}
        answered = {stored.message.correlation_id for stored in self.broker.queues[REPLIES].ready}
        open_ = {body for body in self.confirmed - self.served if body.decode() not in answered}
        left = [name for name in self.broker.queues if name.startswith(NAMES.request_queue_prefix)]
        found = {
            Fault.LOST: open_ - kept,
            Fault.NO_OUTCOME: open_ & kept,
            Fault.BUSY_STOPPED: self.interrupted,
            Fault.WRONG_END: not open_ and (left or self.driver.backend.workers),
        }
        return {fault for fault, evidence in found.items() if evidence}
