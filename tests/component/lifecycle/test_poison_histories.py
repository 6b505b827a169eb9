"""Histories of requests that end their workers beside harmless ones, on the processor of the real worker.

The ledger knows in which deaths a request ran. RabbitMQ counts more: each delivery to a worker that died.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import structlog
from history_process import SimulatedProcess
from history_world import KEYS, NAMES, HistoryWorld, Pool
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lifecycle_world import REPLIES
from test_histories import ALWAYS_THE_SAME, SETTINGS

from osrdyne.aio.signals import WatchCell
from osrdyne.amqp import ConnectionOptions, Message
from osrdyne.processors.failures.dead_letters import RUNS_OF_POISON
from osrdyne.protocol.activity import Event
from osrdyne.protocol.control import Command, control_from_wire
from osrdyne.protocol.messages import PATH_HEADER, PUT_BACKS_HEADER
from osrdyne.protocol.names import QueueName, ReplyAddresses
from osrdyne.protocol.statuses import Status
from osrdyne.testing.fakes.amqp import FakeConnection
from osrdyne.testing.fakes.broker import Holder, Stored
from osrdyne.testing.fakes.loop import MemoryLoop
from osrdyne_worker import App, Call, Context
from osrdyne_worker.requests.dispatch import Dispatcher
from osrdyne_worker.requests.intake import Intake
from osrdyne_worker.requests.processor import Answering, Processor
from osrdyne_worker.requests.replies import ReplySender
from osrdyne_worker.requests.retries import Retries
from osrdyne_worker.requests.scheduling.suspects import RefusedTexts, SuspectGate
from osrdyne_worker.runtime.connection import BrokerConnection
from osrdyne_worker.runtime.reports import Reporter
from osrdyne_worker.runtime.settings import RuntimeContext, RuntimeSettings

COUNT = int(os.environ.get("OSRDYNE_HISTORIES", "60"))
LIMIT = 5
DURATIONS = {"plain": 0.0, "long": 3.0, "deadly": 0.0, "late deadly": 2.0}
"""Seconds for which a request of each kind runs; deadly ones end their process then."""
STEPS = [*[f"{kind} {key}" for kind in DURATIONS for key in KEYS[:3]], "0.2", "1", "6", "kill a", "kill b"]
HISTORIES = st.lists(st.sampled_from(STEPS), min_size=4, max_size=25)
THREADS = ThreadPoolExecutor(1)
"""No handler here uses it."""


class Process:
    """What ends at once: one worker, or several with one gate for suspects."""

    def __init__(self) -> None:
        self.gate = SuspectGate()
        self.workers: list[RealWorker] = []


class RealWorker:
    """The processor, intake and reports of a worker, on the broker of the history."""

    interrupted = None

    def __init__(self, world, fake, process, end_process):
        self.world, self.fake, self.process = world, fake, process
        self.key = fake.spec.key
        self.running: list[Call] = []
        self.connection = FakeConnection(world.broker, ConnectionOptions("amqp://fake"))
        self._end_process = end_process
        self._tasks: list[asyncio.Task] = []
        self._queues = WatchCell[tuple[QueueName, ...]](())
        self._queue = NAMES.request_queue(self.key)
        environment = fake.spec.environment
        worker_id = environment.worker_id
        self.reporter = Reporter(key=self.key, worker_id=worker_id, exchange=NAMES.activity_exchange, clock=world.clock)
        runtime = RuntimeContext(
            RuntimeSettings(concurrency=3, stuck_grace=3600.0), world.clock, self._spawn, lambda reason: None
        )
        app = App()
        app.handler("/")(self._handle)
        self.processor = Processor(
            runtime,
            Context(self.key, worker_id=worker_id),
            dispatcher=Dispatcher(app, threads=THREADS, side_threads=THREADS),
            reporter=self.reporter,
            answering=Answering(
                addresses=ReplyAddresses(NAMES),
                replies=ReplySender(worker_id, 2**20, world.clock),
                retries=Retries(None),
            ),
            refused_texts=RefusedTexts(world.clock, environment.poison),
            suspect_gate=process.gate,
            on_alone=self._update,
        )
        self._runtime = runtime

    def _spawn(self, work):
        task = asyncio.ensure_future(work)
        self._tasks.append(task)
        return task

    def _update(self):
        self._queues.set(() if self.processor.runs_alone else (self._queue,))

    async def live(self):
        self._spawn(self._serve())
        try:
            await self.fake.gone.wait()
        finally:
            self.connection.cut()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self.world.broker.delete_queue(NAMES.control_queue(self.fake.spec.worker_id))

    async def _serve(self):
        world, worker_id = self.world, self.fake.spec.worker_id
        control = world.broker.declare_queue(NAMES.control_queue(worker_id), {})
        for routing_key in (NAMES.control_group_routing_key(self.key), NAMES.control_worker_routing_key(worker_id)):
            world.broker.bind(control.name, NAMES.control_exchange, routing_key)
        control.holders.append(Holder(deliver=self._obey, on_delete=lambda: None))
        broker = BrokerConnection(self.connection, await self.connection.channel(confirms=True), world.clock)
        self._spawn(self.reporter.send(self.connection))
        self.reporter.report(Event.STARTED)
        await world.clock.sleep(0.5)
        self.reporter.report(Event.READY, in_flight=0)
        self._update()
        intake = Intake(self._runtime, broker, self._queue, queues=self._queues, processor=self.processor)
        self._spawn(intake.run())
        while True:
            await world.clock.sleep(5.0)
            if self.processor.in_flight:
                self.reporter.report(Event.BUSY, in_flight=self.processor.in_flight)

    def _obey(self, stored: Stored):
        message = control_from_wire(stored.message.body)
        if message.command is Command.RESUME:
            self.reporter.report(Event.BUSY if self.processor.in_flight else Event.READY, paused=False)
        elif message.command is Command.POISON:
            self.processor.refused_texts.add(message.details.get("texts"))

    async def _handle(self, call: Call):
        self.running.append(call)
        kind = call.body.decode().partition(" ")[2]
        await self.world.clock.sleep(DURATIONS[kind])
        if "deadly" in kind:
            self.world.caused[call.body] += 1
            self.die()
            await asyncio.Event().wait()
        self.running.remove(call)
        return "done"

    def die(self):
        """Its process ends, with whatever runs in it."""
        for worker in self.process.workers:
            for call in worker.running:
                self.world.deaths[call.body] += 1
                self.world.later_deaths[call.body] += call.redelivered or PUT_BACKS_HEADER in call.headers
            worker.running.clear()
            worker.connection.cut()
        self._end_process()


class PoisonWorld(HistoryWorld):
    def __init__(self, pool: Pool, version: str) -> None:
        super().__init__(pool)
        self.broker.version = version
        self.deaths: Counter[bytes] = Counter()
        self.caused: Counter[bytes] = Counter()
        self.later_deaths: Counter[bytes] = Counter()
        """Without those at their first deliveries, which no report may name."""
        self._homes: dict[object, Process] = {}

    def _begin_worker(self, fake, home):
        instance = home.fake.instance if isinstance(home, SimulatedProcess) else fake.instance
        process = self._homes.setdefault(instance.instance_id, Process())
        worker = RealWorker(self, fake, process, lambda: self.driver.exit_instance(instance.instance_id, code=1))
        process.workers.append(worker)
        self.workers.append(worker)
        self.do(worker.live())

    async def _publish(self, body, kind, key):
        self.allowed[body] = {Status.DELIVERY_LIMIT, Status.POISON}
        headers = {PATH_HEADER: "/"}
        message = Message(body=body, reply_to=REPLIES, correlation_id=body.decode(), headers=headers)
        if await self.broker.publish(message, exchange=NAMES.requests_exchange, routing_key=key):
            self.confirmed[body] = key

    async def take(self, step: str) -> None:
        what, _, key = step.rpartition(" ")
        if what == "kill":
            for worker in self.alive(key)[:1]:
                worker.die()
        elif what:
            self.send(what, key)
            await self.clock.settle()
        else:
            await self.clock.advance(float(key))


class TimedLoop(MemoryLoop):
    """Its timers are those of a clock."""

    clock = None

    def call_at(self, when, callback, *args, context=None):
        handle = super().call_at(when, callback, *args, context=context)
        self.clock.call_later(when, lambda: handle.cancelled() or handle._run())
        return handle


@pytest.fixture
def loop():
    """No logs: what goes wrong here is meant to."""
    logs = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with closing(TimedLoop()) as loop:
        yield loop
    structlog.configure(**logs)


def live_through(loop, history: Sequence[str], pool: Pool, version: str):
    async def live() -> PoisonWorld:
        world = PoisonWorld(pool, version)
        loop.clock = world.clock
        try:
            await world.lead()
            for step in history:
                await world.take(step)
                assert world.faults() == {}
            assert await world.rest() == {}
        finally:
            await world.close()
        return world

    return loop.run_until_complete(live())


def check_answers(world: PoisonWorld, pool: Pool) -> None:
    for body, [status] in world.answers().items():
        evidence = (body, status, world.deaths)
        if b"deadly" in body:
            assert status != Status.OK, evidence
            # As documented, once a report names it before it ends its worker; else the delivery limit counts.
            in_time = b"late" in body and pool is Pool.ROOMY
            assert world.caused[body] <= (RUNS_OF_POISON if in_time else LIMIT), evidence
        elif status == Status.DELIVERY_LIMIT:
            # No report may name its first delivery.
            assert world.later_deaths[body] + 1 >= LIMIT, evidence
        elif status == Status.POISON:
            assert world.later_deaths[body] >= 1, evidence


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", ["3.10.8", "4.3.0"])
@pytest.mark.parametrize("pool", [Pool.ROOMY, Pool.POOLED])
@pytest.mark.proves("workers/others-end-the-workers")
def test_only_requests_that_ran_in_deaths_are_poison(loop, pool, version):
    @settings(SETTINGS, max_examples=COUNT // 4, derandomize=ALWAYS_THE_SAME)
    @example(["deadly a"] * 3)
    @example(["deadly a", "plain a"] * 8)
    @example(["long a", "plain a", "long a", *["deadly a", "deadly b"] * 6])
    @given(HISTORIES)
    def check(history):
        check_answers(live_through(loop, history, pool, version), pool)

    check()
