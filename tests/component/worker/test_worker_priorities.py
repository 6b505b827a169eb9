"""Strict priority in the worker: which request runs next when several classes hold some."""

import asyncio
from typing import Any

import pytest
from worker_bench import Bench, serving

from osrdyne.aio.signals import WatchCell
from osrdyne.amqp import Message
from osrdyne.errors import BrokerUnavailableError
from osrdyne.protocol.activity import RETURNED_FIELD, named_requests
from osrdyne.protocol.names import QueueName
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeConnection
from osrdyne_worker import App, Call
from osrdyne_worker.requests.scheduling.priorities import PriorityLevels, Slots

HIGH, MIDDLE, LOW = (QueueName(name) for name in ("k_Pri0", "k_Pri5", "k"))
QUEUES = (HIGH, MIDDLE, LOW)


class Scene(Bench):
    """Three queues; the handler notes what it gets, and waits for `go`, which is set at the beginning."""

    retry_exchange = None

    def __init__(self, *arguments: Any) -> None:
        self.queues = WatchCell[tuple[QueueName, ...]](QUEUES)
        self.served: list[str] = []
        super().__init__(*arguments)
        self.go.set()
        for queue in QUEUES:
            self.broker.declare_queue(queue, {})

    def make_app(self) -> App:
        app = App()

        @app.default_handler
        async def note(call: Call) -> None:
            self.served.append(call.body.decode())
            await self.go.wait()

        return app

    def alone_changed(self) -> None:
        self.queues.set(() if self.processor.runs_alone else QUEUES)

    async def put(self, queue: QueueName, *names: str) -> None:
        for name in names:
            await self.broker.publish(Message(body=name.encode()), exchange="", routing_key=queue)

    async def serve(self, *queues: QueueName) -> None:
        """Begin to consume the queues in this order."""
        for queue in queues or QUEUES:
            self.consume(queue, self.queues)
        await self.clock.advance(1.0)

    async def hold(self, **names: list[str]) -> None:
        """Queues with requests are consumed; those that run wait for `go`."""
        self.go.clear()
        for level, queue in (("high", HIGH), ("middle", MIDDLE), ("low", LOW)):
            await self.put(queue, *names.get(level, []))
        await self.serve()

    async def go_on(self) -> None:
        self.go.set()
        await self.clock.advance(5.0)

    async def finish(self) -> None:
        self.go.set()
        await self.clock.settle()
        await self.stop_intakes()
        await super().finish()


@pytest.fixture
def concurrency():
    return 1


@pytest.fixture
async def scene(concurrency):
    async with serving(Scene, concurrency=concurrency) as scene:
        yield scene


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("order", [QUEUES, QUEUES[::-1]], ids=["high first", "low first"])
async def test_backlog_is_served_by_priority_then_by_arrival(scene, order):
    for number in range(20):
        for queue in (LOW, HIGH, MIDDLE):
            await scene.put(queue, f"{queue} {number}")
    await scene.serve(*order)
    await scene.clock.advance(5.0)
    assert scene.served == [f"{queue} {number}" for queue in QUEUES for number in range(20)]


async def test_high_request_that_comes_while_a_low_one_runs_is_next(scene):
    await scene.hold(low=["low 1", "low 2", "low 3"])
    await scene.put(MIDDLE, "middle")
    await scene.put(HIGH, "high 1", "high 2")
    await scene.go_on()
    assert scene.served == ["low 1", "high 1", "high 2", "middle", "low 2", "low 3"]


@pytest.mark.parametrize("obstacle", ["missing", "without a leader", "without an answer"])
async def test_queue_that_cannot_be_asked_delays_no_other_for_long(scene, obstacle):
    async def fail(command):
        if command.name == "look_up" and command.target == HIGH and scene.served:
            raise BrokerUnavailableError("no answer")

    if obstacle == "missing":
        scene.broker.delete_queue(HIGH)
    elif obstacle == "without a leader":
        scene.broker.set_running(HIGH, False)
    else:
        scene.broker.hook = fail
        await scene.put(HIGH, "high")
    await scene.put(LOW, "low 1", "low 2")
    await scene.serve()
    await scene.clock.advance(60.0 if obstacle == "without a leader" else 5.0)
    assert [name for name in scene.served if name != "high"] == ["low 1", "low 2"]


async def test_queue_whose_leader_is_slow_to_answer_is_not_taken_for_empty(scene):
    await scene.hold(high=["high 1", "high 2"], low=["low"])
    scene.broker.set_running(HIGH, False)
    scene.go.set()
    await scene.clock.advance(1.0)
    assert scene.served == ["high 1"]
    scene.broker.set_running(HIGH, True)
    await scene.clock.advance(5.0)
    assert scene.served == ["high 1", "high 2", "low"]


async def test_level_that_is_no_longer_consumed_delays_no_other(scene):
    await scene.hold(high=["high 1", "high 2"], low=["low"])
    scene.queues.set((MIDDLE, LOW))
    await scene.go_on()
    assert set(scene.served) == {"high 1", "low"}


@pytest.mark.parametrize(("concurrency", "waits"), [(1, 0), (2, 1), (4, 1)])
async def test_at_most_one_request_of_a_level_waits_while_others_run(scene, concurrency, waits):
    """`waits`: how many of the level of the running ones."""
    names = [str(number) for number in range(concurrency + 3)]
    await scene.hold(high=names, middle=names, low=names)
    waiting_in_queues = [len(scene.broker.look_up(queue).ready) for queue in QUEUES]
    assert scene.served == names[:concurrency]
    assert waiting_in_queues == [3 - waits, concurrency + 2, concurrency + 2]


@pytest.mark.parametrize("concurrency", [3])
async def test_pause_requeues_waiting_requests_and_finishes_running_ones(scene):
    names = [f"high {number}" for number in range(6)]
    await scene.hold(high=names)
    scene.queues.set(())
    await scene.clock.advance(1.0)
    assert len(scene.broker.look_up(HIGH).ready) == 3
    await scene.go_on()
    assert scene.served == names[:3]
    scene.queues.set(QUEUES)
    await scene.clock.advance(5.0)
    assert scene.served == names


async def test_request_that_arrives_between_the_stop_and_its_confirm_does_not_begin(scene):
    async def arrive(command):
        if command.name == "cancel" and command.target == HIGH and not command.done:
            scene.broker.hook = None
            await scene.put(HIGH, "late")
            for _ in range(20):  # it comes again and again until the cancel is confirmed
                await asyncio.sleep(0)

    await scene.serve()
    scene.broker.hook = arrive
    scene.queues.set(())
    await scene.clock.advance(1.0)
    assert (scene.served, len(scene.broker.look_up(HIGH).ready)) == ([], 1)


async def test_no_request_gets_ahead_while_a_higher_queue_is_being_asked():
    """Nor when another request of a lower class comes meanwhile."""
    levels, asked = PriorityLevels(VirtualClock()), asyncio.Event()
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def ask():
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


@pytest.mark.parametrize("concurrency", [2])
@pytest.mark.parametrize(
    ("version", "is_lost", "named"),
    [
        ("3.10.8", False, ["runs", "runs too", "waits"]),
        ("4.3.6", False, []),
        ("3.10.8", True, ["waits"]),
        ("4.3.6", True, ["waits"]),
    ],
)
async def test_report_names_what_returned_for_no_fault_of_its_own(scene, version, is_lost, named):
    """What a pause made the worker return, where RabbitMQ counts that; and what only waited when its channel closed."""
    scene.broker.version = version
    names = {}
    async with scene.reporting() as reports:
        await scene.hold(low=["runs", "runs too", "waits"])
        for job in scene.processor._jobs.values():
            names[job.fingerprint] = job.delivery.body.decode()
        if is_lost:
            scene.processor.lose(job.delivery.channel)
        else:
            scene.processor.requeue(also_running=True)
        await scene.clock.settle()
        scene.reporter.flush()
        await scene.clock.settle()
        found = [name for one in reports() for name in named_requests(one.details.get(RETURNED_FIELD))]
    assert sorted(names[name] for name in found) == named


@pytest.mark.parametrize("concurrency", [2])
@pytest.mark.parametrize("version", ["3.10.8", "4.0.5", "4.3.6"])
async def test_suspect_returns_no_request_where_rabbitmq_would_count_it(scene, monkeypatch, version):
    """Requests that were returned so that a suspect could run alone became suspects themselves, and then poison."""
    monkeypatch.setattr(FakeConnection, "server_version", version)
    returned = []

    async def note(command):
        if command.name in {"nack", "reject"} and command.done:
            returned.append(command.target)

    await scene.put(LOW, *(f"low {number}" for number in range(6)))
    dead = await scene.connection.channel()
    consumer = await dead.consume(LOW, prefetch=4)
    await consumer.get()
    await dead.close()
    scene.broker.hook = note
    await scene.serve()
    await scene.clock.advance(300.0)
    assert sorted(scene.served) == [f"low {number}" for number in range(6)]
    assert scene.served[:2] == ["low 4", "low 5"], "suspects run last"
    if version != "4.3.6":
        assert returned == []
