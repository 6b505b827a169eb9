"""A leader of a pool with pooled workers: the real loops, driver and messages; the processes are played."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from osrdyne.amqp import Message
from osrdyne.api.app import create_app
from osrdyne.config.models import LifecycleSettings, PooledSettings, Settings
from osrdyne.daemon.inspector import DaemonInspector, DaemonState
from osrdyne.daemon.term import StopRequest
from osrdyne.drivers.base import Exit, InstanceState
from osrdyne.drivers.pooled.driver import PooledDriver
from osrdyne.drivers.registry import pooled_rules
from osrdyne.pool.groups.memory import INTERVAL
from osrdyne.protocol.activity import ActivityReport, Event
from osrdyne.protocol.control import control_from_wire
from osrdyne.protocol.names import Key, WorkerId
from osrdyne.protocol.pooled import ProcessState, Release, question_of_control
from osrdyne.testing.amqp import FakeChannel
from osrdyne.testing.broker import FakeBroker
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.drivers import FakeBackend, FakeDriver, FakeWorker
from osrdyne.testing.pooled import PlayedProcess
from osrdyne.testing.stack import POOL, Stack, leading, settings_for

A, B, C = map(Key, "abc")


def pooled_settings(**pooled: object) -> Settings:
    lifecycle = LifecycleSettings(unbind_delay=60.0, stop_delay=60.0, settle_delay=10.0)
    settings = settings_for(lifecycle)
    worker = settings.worker.model_copy(
        update={"placement": "pooled", "pooled": PooledSettings.model_validate({"spares": 0, **pooled})}
    )
    return settings.model_copy(update={"worker": worker})


@dataclass
class Processes:
    """The processes that the fake backend starts, each with a connection of its own."""

    clock: VirtualClock
    broker: FakeBroker
    settings: Settings
    backend: FakeBackend = field(default_factory=FakeBackend)
    played: dict[WorkerId, PlayedProcess] = field(default_factory=dict)
    channels: dict[WorkerId, FakeChannel] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def driver(self) -> PooledDriver:
        """The driver of one daemon."""
        inner = FakeDriver(self.clock, pool=POOL, backend=self.backend)
        inner.on_start = lambda worker: self.tasks.append(asyncio.ensure_future(self._run(worker)))
        return PooledDriver(inner, pooled_rules(self.settings))

    async def _run(self, worker: FakeWorker) -> None:
        environment = worker.spec.environment
        name = environment.worker_id
        channel = self.channels[name] = FakeChannel(self.broker)
        process = self.played[name] = PlayedProcess(name, self.clock, lambda state: self._report(name, state))
        queue = f"{POOL}-ctl-{name}"
        await channel.declare_queue(queue, exclusive=True)
        await channel.bind_queue(queue, environment.control_exchange, f"worker.{name}")
        consumer = await channel.consume(queue, prefetch=100)
        process.begin()
        async for delivery in consumer:
            message = control_from_wire(delivery.body)
            assert message is not None
            question = question_of_control(message)
            if question is not None:
                known = len(process.assigned)
                process.take(question, message.generation)
                for worker_id in process.assigned[known:]:
                    assigned = next(one for one in process.state.assignments if one.worker_id == worker_id)
                    self._publish(ActivityReport(assigned.key, Event.READY, worker_id))
            await delivery.ack()

    def _report(self, name: WorkerId, state: ProcessState) -> None:
        self._publish(state.to_report(name))

    def _publish(self, report: ActivityReport) -> None:
        message = Message(body=report.wire_body(), headers=report.wire_headers())
        publish = FakeChannel(self.broker).publish(message, exchange=f"{POOL}-activity-xchg", routing_key=report.key)
        self.tasks.append(asyncio.ensure_future(publish))

    def kill(self, process: PlayedProcess, **end: object) -> None:
        process.alive = False
        self.channels[process.worker_id].end(None)
        worker = next(one for one in self.backend.workers.values() if one.instance.worker_id == process.worker_id)
        self.backend.end(worker, Exit(signal="SIGKILL"))

    def living(self) -> list[PlayedProcess]:
        return [process for process in self.played.values() if process.alive]

    def running(self, key: Key) -> list[WorkerId]:
        """The workers of a key that run, in any process."""
        return [
            one.worker_id
            for process in self.living()
            for one in process.state.assignments
            if one.key == key and one.state == "running"
        ]


@pytest.fixture
def settings() -> Settings:
    return pooled_settings()


@pytest.fixture
async def processes(clock: VirtualClock, settings: Settings) -> AsyncIterator[Processes]:
    found = Processes(clock, FakeBroker(clock), settings)
    yield found
    for task in found.tasks:
        task.cancel()


@asynccontextmanager
async def led(processes: Processes, stop: StopRequest | None = None) -> AsyncIterator[Stack]:
    driver = processes.driver()
    async with leading(
        processes.clock,
        broker=processes.broker,
        driver=driver,  # type: ignore[arg-type]
        settings=processes.settings,
        stop=stop,
    ) as stack:
        yield stack


async def serve(stack: Stack, key: Key) -> None:
    """A worker has served the request that waits."""
    channel = FakeChannel(stack.broker)
    delivery = await channel.get(stack.names.request_queue(key))
    assert delivery is not None
    await delivery.ack()
    await channel.close()


async def test_keys_share_a_process_and_have_queues_of_their_own(processes: Processes, clock: VirtualClock) -> None:
    async with led(processes) as stack:
        for key in (A, B, C):
            await stack.publish(key, key.encode())
        await clock.advance(5.0)
        [process] = processes.living()
        assert sorted(one.key for one in process.state.assignments) == [A, B, C]
        assert [stack.waiting(key) for key in (A, B, C)] == [[b"a"], [b"b"], [b"c"]]


async def test_idle_key_is_released_and_its_queue_deleted_while_the_others_stay(
    processes: Processes, clock: VirtualClock
) -> None:
    async with led(processes) as stack:
        await stack.publish(A)
        await clock.advance(5.0)
        await serve(stack, A)
        stack.term.state.tracker.pin(B)
        await clock.advance(300.0)
        assert not stack.has_queue(A)
        assert (processes.running(A), len(processes.running(B))) == ([], 1)
        [process] = processes.living()
        assert [one.key for one in process.state.assignments] == [B]


async def test_queue_is_deleted_only_after_the_process_has_reported_the_end_of_its_worker(
    processes: Processes, clock: VirtualClock
) -> None:
    async with led(processes) as stack:
        await stack.publish(A)
        await clock.advance(5.0)
        await serve(stack, A)
        [process] = processes.living()
        take = process.take
        process.take = (  # type: ignore[method-assign]
            lambda question, generation: None if isinstance(question, Release) else take(question, generation)
        )
        await clock.advance(125.0)
        assert stack.has_queue(A)
        process.take = take  # type: ignore[method-assign]
        await clock.advance(120.0)
        assert not stack.has_queue(A)


async def test_killed_process_is_replaced_and_all_its_keys_run_again(processes: Processes, clock: VirtualClock) -> None:
    async with led(processes) as stack:
        for key in (A, B, C):
            await stack.publish(key)
        await clock.advance(5.0)
        [process] = processes.living()
        processes.kill(process)
        await clock.advance(10.0)
        [successor] = processes.living()
        assert sorted(one.key for one in successor.state.assignments) == [A, B, C]
        await clock.advance(10.0)
        assert len(processes.backend.workers) == 1


async def test_next_leader_finds_the_workers_and_starts_none(processes: Processes, clock: VirtualClock) -> None:
    async with led(processes) as stack:
        for key in (A, B, C):
            await stack.publish(key)
        await clock.advance(5.0)
        await stack.kill()
    async with led(processes) as stack:
        await clock.advance(60.0)
        [process] = processes.living()
        assert sorted(one.key for one in process.state.assignments) == [A, B, C]
        assert len(process.assigned) == 3
        assert len(stack.term.state.instances.entries()) == 3


async def test_next_leader_waits_for_a_silent_process_and_kills_it(processes: Processes, clock: VirtualClock) -> None:
    async with led(processes) as stack:
        await stack.publish(A)
        await clock.advance(5.0)
        [process] = processes.living()
        process.mute = True
        await stack.kill()
    began = clock.monotonic()
    async with led(processes) as stack:
        assert clock.monotonic() - began >= processes.settings.worker.pooled.process_timeout
        await clock.advance(10.0)
        ended = [worker for worker in processes.backend.workers.values() if worker.gone.is_set()]
        assert [worker.instance.state for worker in ended] in ([], [InstanceState.EXITED])
        assert process.worker_id not in {one.instance.worker_id for one in processes.backend.workers.values()}
        successor = next(one for one in processes.living() if one is not process)
        assert [one.key for one in successor.state.assignments] == [A]


async def test_keys_beyond_the_room_of_all_processes_wait_for_one_that_ends(clock: VirtualClock) -> None:
    processes = Processes(clock, FakeBroker(clock), pooled_settings(keys_per_process=1, max_processes=2))
    async with led(processes) as stack:
        for key in (A, B, C):
            await stack.publish(key)
        await clock.advance(5.0)
        assert (len(processes.running(A)), len(processes.running(B)), processes.running(C)) == (1, 1, [])
        assert stack.term.state.worker_status[C].waiting_for == "max_groups"
        for key in (A, B):
            await serve(stack, key)
        await clock.advance(90.0)
        assert len(processes.running(C)) == 1
    for task in processes.tasks:
        task.cancel()


async def test_least_recently_used_idle_key_ends_while_the_heap_is_full(
    processes: Processes, clock: VirtualClock
) -> None:
    async with led(processes) as stack:
        for key in (A, B):
            await stack.publish(key)
        await clock.advance(5.0)
        for key in (A, B):
            await serve(stack, key)
        [process] = processes.living()
        [of_a], [of_b] = processes.running(A), processes.running(B)
        process.use(of_a, in_flight=0, last_used=clock.time() - 10)
        process.use(of_b, in_flight=0, last_used=clock.time() - 20)
        process.set_heap(0.8)
        await clock.advance(3 * INTERVAL)
        assert (processes.running(A), processes.running(B)) == ([of_a], [])
        assert stack.metrics.memory_relief._value.get() == 1


async def test_process_beyond_its_age_or_requests_is_replaced_without_a_gap(clock: VirtualClock) -> None:
    processes = Processes(clock, FakeBroker(clock), pooled_settings(max_requests=100))
    async with led(processes) as stack:
        stack.term.state.tracker.pin(A)
        await clock.advance(5.0)
        [process] = processes.living()
        [before] = processes.running(A)
        control = FakeChannel(stack.broker)
        await control.declare_queue("control")
        await control.bind_queue("control", stack.names.control_exchange, f"worker.{before}")
        process.set(requests=100)
        for _ in range(60):
            await clock.advance(1.0)
            assert processes.running(A)
            successors = [name for name in processes.running(A) if name != before]
            if successors:
                break
        await clock.advance(5.0)
        assert any(b'"drain"' in body for body in stack.broker.bodies("control"))
        process.end_worker(before, 0)
        await clock.advance(30.0)
        assert processes.running(A) == successors
        assert process.worker_id not in {one.instance.worker_id for one in processes.backend.workers.values()}
    for task in processes.tasks:
        task.cancel()


async def test_stop_with_workers_ends_the_processes(processes: Processes, clock: VirtualClock) -> None:
    async with led(processes, StopRequest(asyncio.Event(), stop_workers=True)) as stack:
        await stack.publish(A)
        await clock.advance(5.0)
        stack.stop.requested.set()
        await clock.advance(30.0)
        assert [worker.instance.state for worker in processes.backend.workers.values()] == [InstanceState.EXITED]


async def test_processes_are_shown_with_their_keys(processes: Processes, clock: VirtualClock) -> None:
    async with led(processes) as stack:
        for key in (A, B):
            await stack.publish(key)
        await clock.advance(5.0)
        [process] = processes.living()
        process.set_heap(0.5)
        await clock.settle()
        inspector = inspector_of(stack)
        [view] = inspector.processes()
        assert (view.worker_id, view.state, view.keys, view.heap_used, view.memory) == (
            process.worker_id,
            "ready",
            (A, B),
            500,
            1500,
        )
        group = inspector.group(A)
        assert group is not None
        assert [worker.process for worker in group.workers] == [process.worker_id]
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(create_app(inspector, stack.metrics, version="1")), base_url="http://test"
        ) as client:
            listed = (await client.get("/v1/processes")).json()
            assert [one["keys"] for one in listed["processes"]] == [["a", "b"]]
            one = await client.get(f"/v1/processes/{process.worker_id[:6]}")
            assert one.json() == listed["processes"][0]
            assert (await client.get("/v1/processes/nosuch")).status_code == 404
            metrics = (await client.get("/metrics")).text
        assert 'osrdyne_processes{state="ready"} 1.0' in metrics
        assert 'osrdyne_process_keys{slot="0"} 2.0' in metrics
        assert 'osrdyne_process_heap_bytes{slot="0"} 500.0' in metrics
        assert "osrdyne_assign_seconds_count 2.0" in metrics


def inspector_of(stack: Stack) -> DaemonInspector:
    state = DaemonState(term=stack.term)
    unused: object = None
    return DaemonInspector(
        pool=POOL,
        state=state,
        driver=stack.driver,
        management=stack.management,
        pins=unused,  # type: ignore[arg-type]
        leader=unused,  # type: ignore[arg-type]
        own_url=str,
        clock=stack.clock,
    )
