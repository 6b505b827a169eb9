"""Strict priority in the worker: which request runs next when several classes hold some."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from osrdyne.aio.signals import WatchCell
from osrdyne.amqp import ConnectionOptions, Message
from osrdyne.errors import BrokerUnavailableError
from osrdyne.protocol.names import Key, PoolNames, QueueName, ReplyAddresses, WorkerId
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeConnection
from osrdyne.testing.fakes.broker import Command, FakeBroker
from osrdyne_worker import App, Call, Context
from osrdyne_worker.requests.dispatch import Dispatcher
from osrdyne_worker.requests.intake import Intake
from osrdyne_worker.requests.processor import Answering, Processor
from osrdyne_worker.requests.replies import ReplySender
from osrdyne_worker.requests.retries import Retries
from osrdyne_worker.requests.scheduling.priorities import PriorityLevels, Slots
from osrdyne_worker.runtime.connection import BrokerConnection
from osrdyne_worker.runtime.reports import Reporter
from osrdyne_worker.runtime.settings import RuntimeContext, RuntimeSettings

HIGH, MIDDLE, LOW = (QueueName(name) for name in ("k_Pri0", "k_Pri5", "k"))
QUEUES = (HIGH, MIDDLE, LOW)


class Scene:
    """A worker's intakes and processor on three queues of a broker in memory. Handlers note what they get."""

    def __init__(self, group: asyncio.TaskGroup, threads: ThreadPoolExecutor, concurrency: int) -> None:
        self.group = group
        self.clock = VirtualClock()
        self.broker = FakeBroker(self.clock)
        self.connection = FakeConnection(self.broker, ConnectionOptions("amqp://fake"))
        self.queues = WatchCell[tuple[QueueName, ...]](QUEUES)
        self.served: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.go = asyncio.Event()
        self.go.set()
        settings = RuntimeSettings(concurrency=concurrency)
        self.runtime = RuntimeContext(settings, self.clock, group.create_task, lambda _: None)
        self.processor = Processor(
            self.runtime,
            Context(Key("k"), worker_id="w"),
            dispatcher=Dispatcher(self.make_app(), threads=threads, side_threads=threads),
            reporter=Reporter(key=Key("k"), worker_id=WorkerId("w"), exchange="activity", clock=self.clock),
            answering=Answering(
                addresses=ReplyAddresses(PoolNames("pool")),
                replies=ReplySender("w", 2**20, self.clock),
                retries=Retries(None),
            ),
        )
        for queue in QUEUES:
            self.broker.declare_queue(queue, {})

    def make_app(self) -> App:
        app = App()

        @app.default_handler
        async def note(call: Call) -> None:
            self.served.append(call.body.decode())
            await self.go.wait()

        return app

    async def put(self, queue: QueueName, *names: str) -> None:
        for name in names:
            await self.broker.publish(Message(body=name.encode()), exchange="", routing_key=queue)

    async def serve(self, *queues: QueueName) -> None:
        """Begin to consume the queues in this order."""
        broker_connection = BrokerConnection(self.connection, await self.connection.channel(confirms=True), self.clock)
        for queue in queues or QUEUES:
            intake = Intake(self.runtime, broker_connection, queue, queues=self.queues, processor=self.processor)
            self.tasks.append(self.group.create_task(intake.run()))


@pytest.fixture
def concurrency() -> int:
    return 1


@pytest.fixture
async def scene(concurrency: int) -> AsyncIterator[Scene]:
    async with asyncio.TaskGroup() as group:
        with ThreadPoolExecutor(2) as threads:
            scene = Scene(group, threads, concurrency)
            yield scene
            scene.go.set()
            await scene.clock.settle()
            for task in scene.tasks:
                task.cancel()


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("order", [QUEUES, QUEUES[::-1]], ids=["high first", "low first"])
async def test_backlog_is_served_by_priority_then_by_arrival(scene: Scene, order: tuple[QueueName, ...]) -> None:
    for number in range(20):
        for queue in (LOW, HIGH, MIDDLE):
            await scene.put(queue, f"{queue} {number}")
    await scene.serve(*order)
    await scene.clock.advance(5.0)
    assert scene.served == [f"{queue} {number}" for queue in QUEUES for number in range(20)]


async def test_high_request_that_comes_while_a_low_one_runs_is_next(scene: Scene) -> None:
    scene.go.clear()
    await scene.put(LOW, "low 1", "low 2", "low 3")
    await scene.serve()
    await scene.clock.advance(1.0)
    await scene.put(MIDDLE, "middle")
    await scene.put(HIGH, "high 1", "high 2")
    scene.go.set()
    await scene.clock.advance(5.0)
    assert scene.served == ["low 1", "high 1", "high 2", "middle", "low 2", "low 3"]


async def test_at_most_one_request_of_a_level_waits_in_the_worker(scene: Scene) -> None:
    scene.go.clear()
    for queue in QUEUES:
        await scene.put(queue, "1", "2", "3")
    await scene.serve()
    await scene.clock.advance(1.0)
    assert [len(scene.broker.look_up(queue).ready) for queue in QUEUES] == [2, 2, 2]


async def test_missing_queue_delays_no_other(scene: Scene) -> None:
    scene.broker.delete_queue(HIGH)
    await scene.put(LOW, "low")
    await scene.serve()
    await scene.clock.advance(5.0)
    assert scene.served == ["low"]


async def test_queue_that_does_not_answer_delays_no_other(scene: Scene) -> None:
    async def fail(command: Command) -> None:
        if command.name == "look_up" and command.target == HIGH and scene.served:
            raise BrokerUnavailableError("no answer")

    scene.broker.hook = fail
    await scene.put(HIGH, "high")
    await scene.put(LOW, "low 1", "low 2")
    await scene.serve()
    await scene.clock.advance(5.0)
    assert scene.served == ["high", "low 1", "low 2"]


async def test_queue_whose_leader_is_slow_to_answer_is_not_taken_for_empty(scene: Scene) -> None:
    scene.go.clear()
    await scene.put(HIGH, "high 1", "high 2")
    await scene.put(LOW, "low")
    await scene.serve()
    await scene.clock.advance(1.0)
    scene.broker.set_running(HIGH, False)
    scene.go.set()
    await scene.clock.advance(1.0)
    assert scene.served == ["high 1"]
    scene.broker.set_running(HIGH, True)
    await scene.clock.advance(5.0)
    assert scene.served == ["high 1", "high 2", "low"]


async def test_queue_whose_leader_is_gone_delays_no_other_for_long(scene: Scene) -> None:
    scene.broker.set_running(HIGH, False)
    await scene.put(LOW, "low 1", "low 2")
    await scene.serve()
    await scene.clock.advance(60.0)
    assert scene.served == ["low 1", "low 2"]


async def test_level_that_is_no_longer_consumed_delays_no_other(scene: Scene) -> None:
    scene.go.clear()
    await scene.put(HIGH, "high 1", "high 2")
    await scene.put(LOW, "low")
    await scene.serve()
    await scene.clock.advance(1.0)
    scene.queues.set((MIDDLE, LOW))
    scene.go.set()
    await scene.clock.advance(5.0)
    assert set(scene.served) == {"high 1", "low"}


@pytest.mark.parametrize("concurrency", [2])
async def test_one_level_fills_all_slots(scene: Scene) -> None:
    scene.go.clear()
    await scene.put(HIGH, "high 1", "high 2", "high 3", "high 4")
    await scene.put(LOW, "low")
    await scene.serve()
    await scene.clock.advance(1.0)
    assert scene.served == ["high 1", "high 2"]
    assert len(scene.broker.look_up(HIGH).ready) == 1, "one runs in each place, one waits in the worker"


@pytest.mark.parametrize("concurrency", [2, 4])
async def test_at_most_one_request_of_a_level_waits_while_others_run(scene: Scene, concurrency: int) -> None:
    scene.go.clear()
    for queue in QUEUES:
        await scene.put(queue, *(f"{queue} {number}" for number in range(concurrency + 3)))
    await scene.serve()
    await scene.clock.advance(1.0)
    waiting_in_queues = [len(scene.broker.look_up(queue).ready) for queue in QUEUES]
    assert scene.served == [f"{HIGH} {number}" for number in range(concurrency)]
    assert waiting_in_queues == [2, concurrency + 2, concurrency + 2]


@pytest.mark.parametrize("concurrency", [3])
async def test_pause_requeues_waiting_requests_and_finishes_running_ones(scene: Scene) -> None:
    scene.go.clear()
    await scene.put(HIGH, *(f"high {number}" for number in range(6)))
    await scene.serve()
    await scene.clock.advance(1.0)
    scene.queues.set(())
    await scene.clock.advance(1.0)
    assert len(scene.broker.look_up(HIGH).ready) == 3
    scene.go.set()
    await scene.clock.advance(1.0)
    assert scene.served == [f"high {number}" for number in range(3)]
    scene.queues.set(QUEUES)
    await scene.clock.advance(5.0)
    assert scene.served == [f"high {number}" for number in range(6)]


async def test_no_request_gets_ahead_while_a_higher_queue_is_being_asked() -> None:
    """Nor when another request of a lower class comes meanwhile."""
    levels, asked = PriorityLevels(VirtualClock()), asyncio.Event()
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def ask() -> int:
        asked.set()
        return await answer

    levels.of(HIGH).attach(0, ask)
    async with asyncio.TaskGroup() as group:
        slots = Slots(1, levels=levels, spawn=group.create_task)
        middle = group.create_task(slots.acquire(1))
        await asked.wait()
        low = group.create_task(slots.acquire(2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (middle.done(), low.done()) == (False, False)
        answer.set_result(0)
        await middle
        assert not low.done()
        slots.release()


async def test_slot_without_levels_is_acquired_at_once() -> None:
    assert Slots(1, levels=PriorityLevels(VirtualClock())).try_acquire(0)
