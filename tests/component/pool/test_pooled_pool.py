"""A leader of a pool with pooled workers: the real loops, driver and messages; the processes are simulated."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest
from history_process import SimulatedProcess
from inspectors import inspector_of

from osrdyne.amqp import Message
from osrdyne.api.app import create_app
from osrdyne.config.models import LifecycleSettings, PooledSettings, Settings
from osrdyne.config.profiles import Profile
from osrdyne.daemon.inspector import DaemonInspector
from osrdyne.daemon.term import StopRequest
from osrdyne.drivers.base import Exit, InstanceState
from osrdyne.drivers.pooled.driver import PooledDriver
from osrdyne.drivers.registry import pooled_rules
from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.pool.groups.memory import HEAP_INTERVAL, POLL_INTERVAL
from osrdyne.pool.state.groups.transitions import GroupStatus
from osrdyne.protocol.activity import ActivityReport, Event
from osrdyne.protocol.names import Key, PoolNames, WorkerId
from osrdyne.protocol.pooled import PROCESS_KEY, Release
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.drivers import FakeBackend, FakeDriver, FakeWorker
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import POOL, Stack, leading, settings_for

A, B, C = map(Key, "abc")
NAMES = PoolNames(POOL)


def pooled_settings(*, lifecycle: dict[str, float] | None = None, **pooled: object) -> Settings:
    delays = {"unbind_delay": 60.0, "stop_delay": 60.0, "settle_delay": 10.0} | (lifecycle or {})
    settings = settings_for(LifecycleSettings.model_validate(delays))
    changes = {"placement": "pooled", "pooled": PooledSettings.model_validate({"spares": 0, **pooled})}
    return settings.model_copy(update={"worker": settings.worker.model_copy(update=changes)})


@dataclass
class Processes:
    """The processes that the fake backend starts."""

    clock: VirtualClock
    broker: FakeBroker
    settings: Settings
    backend: FakeBackend = field(default_factory=FakeBackend)
    played: list[SimulatedProcess] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    loading: set[Key] = field(default_factory=set)
    """Keys whose workers do not become ready."""
    paused: list[WorkerId] = field(default_factory=list)
    """Workers that were assigned paused."""

    def driver(self) -> PooledDriver:
        """The driver of one daemon."""
        inner = FakeDriver(self.clock, pool=POOL, backend=self.backend)
        inner.on_start = self._begin
        return PooledDriver(inner, pooled_rules(self.settings))

    def _begin(self, fake: FakeWorker) -> None:
        if fake.spec.key != PROCESS_KEY:  # a worker with a process of its own
            return self._begin_worker(fake)
        process = SimulatedProcess(
            fake, names=NAMES, broker=self.broker, clock=self.clock, begin_worker=self._begin_worker
        )
        self.played.append(process)
        self.tasks.append(asyncio.ensure_future(process.live()))
        return None

    def _begin_worker(self, fake: FakeWorker, _: SimulatedProcess | None = None) -> None:
        key, worker_id = fake.spec.key, fake.spec.worker_id
        if fake.spec.environment.paused:
            self.paused.append(worker_id)
        report = ActivityReport(key, Event.STARTED if key in self.loading else Event.READY, worker_id)
        message = Message(body=report.wire_body(), headers=report.wire_headers())

        def send() -> None:
            self.broker.queues[NAMES.activity_queue].put(message, exchange=NAMES.activity_exchange, routing_key=key)

        self.clock.call_later(0.1, send)

    def alone(self, key: Key) -> list[FakeWorker]:
        """The workers of a key that run in processes of their own."""
        workers = self.backend.workers.values()
        return [one for one in workers if one.instance.key == key and one.instance.state is InstanceState.RUNNING]

    def kill(self, process: SimulatedProcess) -> None:
        self.backend.end(process.fake, Exit(signal="SIGKILL"))

    def living(self) -> list[SimulatedProcess]:
        return [process for process in self.played if process.alive]

    def process_of(self, worker: WorkerId) -> SimulatedProcess:
        return next(process for process in self.living() if worker in process.assigned)

    def used(self, key: Key, ago: float | None) -> WorkerId:
        """The only worker of a key was last used so many seconds ago, or is busy."""
        [worker] = self.running(key)
        last_used = None if ago is None else self.clock.time() - ago
        self.process_of(worker).use(worker, in_flight=int(ago is None), last_used=last_used)
        return worker

    def running(self, key: Key) -> list[WorkerId]:
        """The workers of a key that run, in any process."""
        return [
            one.worker_id
            for process in self.living()
            for one in process.state.assignments
            if one.key == key and one.state == "running"
        ]


@pytest.fixture
async def processes(clock, broker):
    found = Processes(clock, broker, pooled_settings())
    yield found
    for task in found.tasks:
        task.cancel()


@pytest.fixture
async def stack(processes):
    async with led(processes) as stack:
        yield stack


@asynccontextmanager
async def led(processes: Processes, stop: StopRequest | None = None) -> AsyncIterator[Stack]:
    driver, settings = processes.driver(), processes.settings
    async with leading(processes.clock, broker=processes.broker, driver=driver, settings=settings, stop=stop) as stack:
        yield stack


async def ask(stack: Stack, *keys: Key, served: bool = False) -> None:
    """A request for each key comes, and workers start, and serve the requests."""
    for key in keys:
        await stack.publish(key)
    await stack.clock.advance(5.0)
    for key in keys if served else ():
        delivery = await stack.take(key)
        await delivery.ack()
        await delivery.channel.close()


async def require(stack: Stack, *keys: Key) -> None:
    for key in keys:
        stack.require(key)
    await stack.clock.advance(5.0)


@pytest.mark.proves("circuits/group-open-circuit-worker")
async def test_key_that_a_circuit_pauses_gets_no_worker_but_a_paused_one_for_a_probe(stack, processes, clock):
    stack.pause(A)
    for key in (A, B):
        await stack.publish(key)
    await clock.advance(30.0)
    assert (processes.running(A), len(processes.running(B)), processes.paused) == ([], 1, [])
    stack.probe({A})
    await clock.advance(5.0)
    assert (processes.running(A), len(processes.living())) == (processes.paused, 1)
    assert len(processes.paused) == 1


@pytest.mark.proves("pooled/process-confirm-end-released")
async def test_queue_is_deleted_only_after_the_process_has_reported_the_end_of_its_worker(stack, processes):
    await ask(stack, A, served=True)
    [process] = processes.living()
    take = process.take
    process.take = lambda question, generation: None if isinstance(question, Release) else take(question, generation)
    await stack.clock.advance(125.0)
    assert stack.has_queue(A)
    process.take = take
    await stack.clock.advance(120.0)
    assert not stack.has_queue(A)


@pytest.mark.proves("pooled/process-ends-keys-load")
async def test_end_of_a_process_is_no_failed_start_of_the_keys_that_load_in_it(stack, processes):
    """A ends each process in which it loads its data; B loads beside it."""
    processes.loading |= {A, B}
    attempts = processes.settings.lifecycle.start_attempts
    await require(stack, A, B)
    for ends in range(2):
        [process] = processes.living()
        assert sorted(one.key for one in process.state.assignments) == [A, B]
        if ends == 1:
            processes.loading.discard(B)
        processes.kill(process)
        await stack.clock.advance(30.0)
        assert stack.failure_of(B) is None
    # Both have loaded at two ends: one of them may be the cause.
    [of_b] = processes.running(B)
    for _ in range(attempts):
        [of_a] = processes.running(A)
        own = processes.process_of(of_a)
        assert own is not processes.process_of(of_b)
        processes.kill(own)
        await stack.clock.advance(5.0)
    assert stack.failure_of(A).attempts == attempts
    assert (processes.running(A), processes.running(B)) == ([], [of_b])


@pytest.mark.proves("pooled/all-processes-full")
async def test_keys_beyond_the_room_of_all_processes_wait_for_one_that_ends(processes):
    processes.settings = pooled_settings(keys_per_process=1, max_processes=2)
    async with led(processes) as stack:
        await ask(stack, A, B, served=True)
        await ask(stack, C)
        assert (len(processes.running(A)), len(processes.running(B)), processes.running(C)) == (1, 1, [])
        assert stack.waits_for(C) == "max_groups"
        await stack.clock.advance(90.0)
        assert len(processes.running(C)) == 1


@pytest.mark.parametrize(("state", "used"), [("idle", 10), ("loading", 30), ("unbound", None)])
@pytest.mark.proves("pooled/heap-process-nearly-full")
async def test_least_recently_used_idle_key_ends_while_the_heap_is_full(processes, state, used):
    """B was used 20 s ago. A was used after that, or loads its data, or is busy and unbound."""
    processes.settings = pooled_settings(lifecycle={"stop_delay": 3600.0})
    processes.loading |= {A} if state == "loading" else set()
    async with led(processes) as stack:
        await require(stack, A, B)
        if state == "unbound":
            await stack.clock.advance(70.0)
        expected = GroupStatus.UNBOUND if state == "unbound" else GroupStatus.ACTIVE
        assert stack.status_of(A) is stack.status_of(B) is expected
        [process] = processes.living()
        of_a, _ = processes.used(A, used), processes.used(B, 20)
        process.set_heap(0.8)
        await stack.clock.advance(3 * HEAP_INTERVAL)
        assert (processes.running(A), processes.running(B)) == ([of_a], [])
        assert stack.metrics.memory_relief._value.get() == 1


@pytest.mark.parametrize("state", ["idle", "busy", "pinned"])
@pytest.mark.proves("pooled/max-processes-processes-run")
async def test_process_of_idle_keys_ends_for_a_key_with_other_settings(processes, state):
    processes.settings = profiled(pooled_settings(max_processes=1), {"match": "c", "memory": "2GiB"})
    async with led(processes) as stack:
        await require(stack, A, B)
        assert len(processes.living()) == 1
        before = [processes.used(A, 10)], [processes.used(B, None if state == "busy" else 10)]
        if state == "pinned":
            stack.pin(B)
        await require(stack, C)
        await stack.clock.advance(5 * HEAP_INTERVAL)
        assert (processes.running(A), processes.running(B)) == (([], []) if state == "idle" else before)
        assert len(processes.running(C)) == (1 if state == "idle" else 0)


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.proves("pooled/all-processes-full")
async def test_idle_key_ends_for_another_one_with_the_same_settings(processes, busy):
    """Where some keys are not pooled, `max_groups` does not follow from the room of the processes."""
    settings = pooled_settings(max_processes=1, keys_per_process=2)
    processes.settings = profiled(settings, {"match": "{x:[abc]}", "placement": "pooled"}, placement="dedicated")
    async with led(processes) as stack:
        await require(stack, A, B)
        [process] = processes.living()
        of_a, of_b = processes.used(A, 10), processes.used(B, None if busy else 20)
        await require(stack, C)
        await stack.clock.advance(2 * HEAP_INTERVAL + 5)
        assert (processes.running(A), processes.running(B)) == (([], [of_b]) if busy else ([of_a], []))
        assert len(processes.running(C)) == 1
        assert processes.living() == [process]


@pytest.mark.proves("pooled/host-cgroup-process-short")
async def test_short_host_ends_idle_keys_first_and_then_the_least_loaded_process(processes):
    processes.settings = pooled_settings(keys_per_process=2)
    async with led(processes) as stack:
        for key in (A, B, C):
            await ask(stack, key, served=True)
        of_a, _, of_c = processes.used(A, None), processes.used(B, 20), processes.used(C, None)
        for process in processes.living():
            process.set_memory_limit(0.9)
        pressure = stack.metrics.memory_pressure
        while processes.running(B):  # an idle key goes first
            assert pressure.labels(action="process")._value.get() == 0
            await stack.clock.advance(1.0)
        assert pressure.labels(action="group")._value.get() == 1
        await stack.clock.advance(3 * POLL_INTERVAL)
        assert pressure.labels(action="process")._value.get() == 1
        assert (of_a in processes.running(A), of_c in processes.running(C)) == (True, True)
        assert sum(bool(one.retiring) for one in stack.driver.processes.values()) == 1


async def test_idle_keys_of_a_short_host_end_by_the_eviction_of_their_profile(processes):
    of_profiles = ({"match": "a", "eviction": "last"}, {"match": "c", "eviction": "first", "unbind_delay": "1h"})
    processes.settings = profiled(pooled_settings(keys_per_process=3), *of_profiles)
    async with led(processes) as stack:
        await ask(stack, A, B, C, served=True)
        [process] = processes.living()
        for number, key in enumerate((A, B, C)):
            processes.used(key, 30 - number)
        process.set_memory_limit(0.9)
        ended = []
        while len(ended) < 3:
            await stack.clock.advance(1.0)
            ended += [key for key in (A, B, C) if not processes.running(key) and key not in ended]
        assert ended == [C, B, A]


@pytest.mark.proves("pooled/request-ends-each-process")
async def test_text_of_a_suspect_is_refused_only_where_no_other_key_was_in_the_process(stack, processes):
    """Suspects of two keys may run in a process that ends: only one of them is the cause."""

    async def end_with_suspects(*keys):
        """The first process of these keys; the texts that are refused then."""
        [worker, *_] = workers = [processes.running(key)[0] for key in keys]
        for key, one in zip(keys, workers, strict=True):
            busy = {"in_flight": 1, "requests": ["f00d"], "suspects": 1, "alone": f"text-{key}"}
            await stack.report(key, Event.BUSY, one, **busy)
        processes.kill(processes.process_of(worker))
        await stack.clock.advance(10.0)
        return [set(stack.poison_texts.of_key(key)) for key in (A, B)]

    await ask(stack, A, B)
    assert await end_with_suspects(A, B) == [set(), set()]
    [of_a], [of_b] = processes.running(A), processes.running(B)
    assert processes.process_of(of_a) is not processes.process_of(of_b)
    assert await end_with_suspects(A) == [{"text-a"}, set()]
    assert processes.running(B) == [of_b]


async def test_stop_with_workers_ends_the_processes(processes, clock):
    async with led(processes, StopRequest(asyncio.Event(), stop_workers=True)) as stack:
        await ask(stack, A)
        stack.stop.requested.set()
        await clock.advance(30.0)
        assert [worker.instance.state for worker in processes.backend.workers.values()] == [InstanceState.EXITED]


async def test_processes_are_shown_with_their_keys(stack, processes, clock):
    await ask(stack, A, B)
    [process] = processes.living()
    process.set_heap(0.5)
    process.set(cold_start={"jvm": 2500, "unknown": 1})
    await clock.settle()
    inspector = inspector_of(stack, DaemonInspector)
    [view] = inspector.processes()
    shown = (view.worker_id, view.state, view.keys, view.heap_used, view.memory)
    assert shown == (process.worker_id, "ready", (A, B), 500, 1500)
    assert [worker.process for worker in inspector.group(A).workers] == [process.worker_id]
    transport = httpx.ASGITransport(create_app(inspector, stack.metrics, version="1"))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        [listed] = (await client.get("/v1/processes")).json()["processes"]
        assert (listed["keys"], listed["cold_start"]) == (["a", "b"], {"jvm": 2500})
        assert (await client.get(f"/v1/processes/{process.worker_id[:6]}")).json() == listed
        assert (await client.get("/v1/processes/nosuch")).status_code == 404
        metrics = (await client.get("/metrics")).text.splitlines()
    assert {
        'osrdyne_processes{state="ready"} 1.0', 'osrdyne_process_keys{slot="0"} 2.0',
        'osrdyne_process_heap_bytes{slot="0"} 500.0', "osrdyne_assign_seconds_count 2.0",
    } <= set(metrics)  # fmt: skip


def profiled(settings: Settings, *profiles: dict[str, object], placement: str = "pooled") -> Settings:
    found = tuple(Profile.model_validate(profile) for profile in profiles)
    worker = settings.worker.model_copy(update={"profiles": found, "placement": placement})
    return settings.model_copy(update={"worker": worker})


async def change(stack: Stack, *profiles: dict[str, object]) -> None:
    await stack.term.routing.profiles.change_text(json.dumps({"profiles": profiles}), author="me")


async def ended(stack: Stack, call: Awaitable[None]) -> None:
    """Let time pass in which a call ends."""
    task = asyncio.ensure_future(call)
    await stack.clock.advance(5.0)
    await task


async def test_pooled_processes_belong_to_the_settings_of_one_profile(processes):
    of_b, of_c = {"match": "b", "memory": "2GiB", "spares": 1}, {"match": "c", "memory": "2GiB", "unbind_delay": "1h"}
    processes.settings = profiled(processes.settings, of_b, of_c)
    async with led(processes) as stack:
        await require(stack, A, B, C)
        own, shared = stack.driver.settings.values()
        assert (own.profile, shared.profile, shared.spares) == (None, "b", 1)
        places = {worker.key: one.settings_hash for one in stack.driver.processes.values() for worker in one.workers()}
        assert places == {A: own.hash, B: shared.hash, C: shared.hash}
        specs = [one.spec for one in processes.backend.workers.values()]
        configs = {spec.spec_hash: spec.environment.config["spark"]["conf"] for spec in specs}
        assert configs == {own.hash: {}, shared.hash: {"spark.driver.memory": "2048m"}}


@pytest.mark.parametrize(("first", "then"), [("pooled", "dedicated"), ("dedicated", "pooled")])
async def test_change_of_the_placement_moves_the_workers_of_a_profile(processes, first, then):
    """The successor starts first. The next leader finds what there is."""

    def places():
        return len(processes.alone(B)), len(processes.running(B)), len(processes.running(A))

    expected = {"dedicated": (1, 0, 1), "pooled": (0, 1, 1)}
    processes.settings = profiled(processes.settings, {"match": "b", "placement": first})
    async with led(processes) as stack:
        await require(stack, A, B)
        assert places() == expected[first]
        await change(stack, {"match": "b", "placement": then})
        await stack.clock.advance(5.0)
        # The old worker is asked to drain. It is played, and ends only when it is stopped.
        [old] = [one for one in stack.instances_of(B) if one.draining]
        await ended(stack, stack.driver.stop(old.instance.instance_id, grace=1.0))
        assert places() == expected[then]
    async with led(processes) as stack:
        await stack.clock.advance(30.0)
        assert places() == expected[then]


@pytest.mark.proves("pooled/stored-profile-placement-pooled")
async def test_stored_placement_that_the_next_daemon_does_not_have_is_left_out(processes, clock, broker, driver):
    profiles = ({"match": "b", "placement": "pooled"}, {"match": "c", "concurrency": 2})
    async with led(processes) as stack:
        await change(stack, *profiles)
    settings = profiled(processes.settings, placement="dedicated")
    async with leading(clock, broker=broker, driver=driver, settings=settings) as stack:
        [problem] = stack.term.routing.profiles.left_out
        assert (problem.path, stack.profile_of(B).profile) == ("profiles.0", None)
        await require(stack, B)
        assert len(driver.workers_of(B)) == 1
        with pytest.raises(InvalidDocumentError, match=r"profiles\.0"):
            await change(stack, *profiles)
