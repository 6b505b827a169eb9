"""The driver of pooled workers in virtual time: its processes and the messages to them are played."""

import asyncio
import json
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pytest
from structlog.testing import capture_logs

from osrdyne.drivers.base import Exit, Instance, InstanceState, WorkerSpec
from osrdyne.drivers.pooled.driver import PooledDriver
from osrdyne.drivers.pooled.placement import EMPTY_FOR, PooledRules, ProcessSettings
from osrdyne.drivers.pooled.process import SETTLE, split_id
from osrdyne.drivers.pooled.upkeep import LIST_INTERVAL, SPARE_LIMIT, SPARE_REST, PooledUpkeep
from osrdyne.errors import DriverUnavailableError, LeadershipLostError, SlotTakenError, StartFailedError
from osrdyne.protocol.environment import Placement
from osrdyne.protocol.names import Key, WorkerId
from osrdyne.protocol.pooled import Assign, Forget, Release
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.driver_harness import make_spec
from osrdyne.testing.drivers import FakeBackend, FakeDriver, FakeWorker
from osrdyne.testing.played_process import PlayedProcess
from osrdyne.testing.pooled import PlayedLink, PlayedNetwork

T = TypeVar("T")

RULES = PooledRules(keys_per_process=3, spares=0, max_processes=3)
A, B, C, D = map(Key, "abcd")


def spec_of(key: Key, slot: int = 0) -> WorkerSpec:
    return make_spec(key, slot=slot, pool="pool")


@dataclass
class World:
    """A pool's processes, and the drivers of one leader after the other."""

    clock: VirtualClock
    backend: FakeBackend = field(default_factory=FakeBackend)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    ready: bool = True
    """Whether new processes are ready at once."""
    rules: PooledRules = RULES

    def __post_init__(self) -> None:
        self.network = PlayedNetwork(self.clock)
        self.link: PlayedLink
        self.driver = self.lead(term=3)

    def lead(self, *, term: int, spec_hash: str = "spec") -> PooledDriver:
        """The driver of another daemon, in its first term."""
        self.inner = FakeDriver(self.clock, backend=self.backend, spec_hash=spec_hash)
        self.inner.on_start = self._start_process
        self.link = PlayedLink(self.network.ask, term=term)
        self.driver = PooledDriver(self.inner, self.rules)
        self.driver.begin_term(self.link)
        self.network.drivers.append(self.driver)
        self.tasks.append(asyncio.ensure_future(PooledUpkeep(self.driver).run()))
        self.tasks.append(asyncio.ensure_future(self._watch(self.driver)))
        return self.driver

    async def _watch(self, driver: PooledDriver) -> None:
        """As the loop of worker groups does."""
        async for _ in driver.events():
            pass

    def _start_process(self, worker: FakeWorker) -> None:
        self.network.start_process(worker.instance.worker_id, ready=self.ready)

    def begin(self, key: Key, slot: int = 0) -> asyncio.Future[Instance]:
        """A start that goes on while time passes."""
        return asyncio.ensure_future(self.driver.start(spec_of(key, slot)))

    async def start(self, key: Key, slot: int = 0) -> Instance:
        return await self.within(1.0, self.driver.start(spec_of(key, slot)))

    async def listed(self) -> dict[Key, Instance]:
        return {instance.key: instance for instance in await self.within(1.0, self.driver.list_instances())}

    async def stop(self, instance: Instance) -> None:
        await self.within(5.0, self.driver.stop(instance.instance_id, grace=10.0))

    async def end(self, instance: Instance) -> None:
        """Stop a worker and forget it, as the pool does."""
        await self.stop(instance)
        await self.within(5.0, self.driver.remove(instance.instance_id))

    async def within(self, seconds: float, call: Awaitable[T]) -> T:
        """The result of a call, which has ended when these seconds are over."""
        task = asyncio.ensure_future(call)
        await self.clock.advance(seconds)
        return await done(task)

    def process_of(self, instance: Instance) -> PlayedProcess:
        found = split_id(instance.instance_id)
        assert found is not None
        return self.network.processes[found[0]]

    def running_processes(self) -> list[WorkerId]:
        instances = [worker.instance for worker in self.backend.workers.values()]
        return [one.worker_id for one in instances if one.state is InstanceState.RUNNING]

    def end_process(self, process: PlayedProcess, code: int = 137) -> None:
        """The process dies, with all its workers."""
        process.alive = False
        self.write(process, "java.lang.OutOfMemoryError")
        self.backend.end(self._worker_of(process), Exit(code=code, reason="out of memory"))

    def write(self, process: PlayedProcess, *lines: str) -> None:
        """The process writes lines to its log."""
        self._worker_of(process).lines += lines

    def _worker_of(self, process: PlayedProcess) -> FakeWorker:
        """The process as the platform sees it."""
        return next(one for one in self.backend.workers.values() if one.instance.worker_id == process.worker_id)

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()


async def done(task: asyncio.Future[T]) -> T:
    assert task.done(), "it is still under way"
    return await task


@contextmanager
def world_of(clock: VirtualClock, rules: PooledRules = RULES, *, ready: bool = True) -> Iterator[World]:
    world = World(clock, rules=rules, ready=ready)
    yield world
    world.close()


@pytest.fixture
async def world(clock):
    with world_of(clock) as world:
        yield world


async def fails(awaitable: Awaitable[object], error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        await awaitable
    return str(caught.value)


class TestPlacement:
    @pytest.mark.proves("pooled/heap-process-nearly-full")
    async def test_keys_share_a_process_up_to_its_limit_and_get_the_least_loaded_one_with_a_free_heap(self, world):
        instances = [await world.start(key) for key in (A, B, C, D)]
        first, *others, last = map(world.process_of, instances)
        assert all(process is first for process in others)
        assert last is not first
        for instance in instances[:3]:
            await world.end(instance)
        again = [world.process_of(await world.start(key)) for key in (A, B)]
        first.set_heap(0.8)
        await world.clock.advance(0.1)
        again.append(world.process_of(await world.start(C)))
        assert list(map(id, again)) == list(map(id, (first, first, last)))  # the second one: as loaded, and older
        last.set_heap(0.8)
        await world.clock.advance(0.1)
        assert world.process_of(await world.start(Key("e"))) not in (first, last)

    @pytest.mark.proves("pooled/all-processes-full")
    async def test_start_waits_while_all_processes_are_full_and_fails_in_the_end(self, clock):
        with world_of(clock, replace(RULES, keys_per_process=1, max_processes=1)) as world:
            full = await world.start(A)
            waiting = world.begin(B)
            await clock.advance(100.0)
            assert not waiting.done()
            late = world.begin(C)
            await clock.settle()
            await world.end(full)
            assert world.process_of(await done(waiting)) is world.process_of(full)
            await clock.advance(RULES.start_timeout + 1)
            assert "worker.pooled.max_processes" in await fails(done(late), StartFailedError)

    async def test_processes_of_old_settings_get_no_keys_and_end_when_empty(self, world):
        old = await world.start(A)
        world.close()  # a leader that still led would end the processes of the other one's settings
        world.lead(term=4, spec_hash="changed")
        assert (await world.listed())[A].spec_hash != world.driver.spec_hash()
        new = await world.start(B)
        assert world.process_of(new) is not world.process_of(old)
        assert new.spec_hash == world.driver.spec_hash()
        await world.end((await world.listed())[A])
        await world.clock.advance(5.0)
        assert world.running_processes() == [world.process_of(new).worker_id]


class TestSpares:
    async def test_spare_is_there_before_the_first_key_and_is_replaced(self, clock):
        with world_of(clock, replace(RULES, spares=1)) as world:
            await clock.advance(2.0)
            [spare] = world.running_processes()
            assert world.process_of(await world.start(A)).worker_id == spare
            for seconds in (2.0, 300.0):
                await clock.advance(seconds)
                assert len(world.running_processes()) == 2

    async def test_empty_process_beyond_the_spares_ends_after_a_while(self, world, clock):
        await world.end(await world.start(A))
        await clock.advance(EMPTY_FOR - 15)
        assert len(world.running_processes()) == 1
        await clock.advance(20.0)
        assert (world.running_processes(), world.backend.workers) == ([], {})
        assert len(world.link.released) == 1

    async def test_spares_wait_for_real_starts(self, clock):
        with world_of(clock, replace(RULES, spares=2, keys_per_process=1), ready=False) as world:
            start = world.begin(A)
            await clock.advance(10.0)
            assert len(world.running_processes()) == 1
            for process in world.network.processes.values():
                process.set(ready=True)
            await clock.advance(10.0)
            await done(start)
            assert len(world.running_processes()) == 3

    @pytest.mark.proves("pooled/worker-loads-data-without")
    async def test_spare_waits_while_workers_run_suspects_or_load_their_data_but_not_without_end(self, clock):
        with world_of(clock, replace(RULES, spares=1, keys_per_process=1)) as world:
            await clock.advance(2.0)
            spec, endless = spec_of(A), spec_of(B)
            world.link.loading = {spec.worker_id}
            await world.within(SPARE_LIMIT / 2, world.driver.start(spec))
            world.link.loading, world.link.suspects = set(), world.link.loading
            await clock.advance(SPARE_LIMIT / 2 - 5)
            assert len(world.running_processes()) == 1
            world.link.suspects = set()
            await clock.advance(SPARE_REST + 1)
            assert len(world.running_processes()) == 2
            world.link.loading = {endless.worker_id}
            await world.within(SPARE_LIMIT + 5, world.driver.start(endless))
            assert len(world.running_processes()) == 3

    @pytest.mark.proves("pooled/process-ends-ready")
    async def test_process_that_ends_before_it_is_ready_fails_the_starts_that_wait(self, clock):
        with world_of(clock, ready=False) as world:
            start = world.begin(A)
            await clock.advance(2.0)
            for number in range(RULES.start_attempts):
                assert not start.done()
                world.end_process(list(world.network.processes.values())[number], code=4)
                await clock.advance(5.0)
            with pytest.raises(StartFailedError) as caught:
                await done(start)
            assert caught.value.log_lines == ("java.lang.OutOfMemoryError",)
            await clock.advance(60.0)
            assert world.backend.workers == {}

    @pytest.mark.proves("pooled/platform-s-event-end")
    async def test_end_of_a_process_whose_event_is_lost_is_noticed_before_it_was_ready(self, clock):
        with world_of(clock, ready=False) as world, capture_logs() as logs:
            world.tasks.pop().cancel()  # the stream of the driver's events
            start = world.begin(A)
            await clock.advance(2.0)
            [failed] = world.network.processes.values()
            world.end_process(failed, code=1)
            world.ready = True
            await clock.advance(LIST_INTERVAL + 5)
            assert world.process_of(await done(start)) is not failed
        assert "java.lang.OutOfMemoryError" in str(logs)  # its last output

    @pytest.mark.parametrize("accepted", [True, False])
    @pytest.mark.proves("pooled/process-ends-ready", "pooled/driver-accepts-process-full")
    async def test_failing_starts_of_processes_back_off(self, clock, accepted):
        """Each attempt creates a user in RabbitMQ, which is removed after the start time-out only."""
        with world_of(clock, replace(RULES, spares=1), ready=False) as world:
            for _ in range(600):
                if not accepted:
                    world.inner.fail_next_start(DriverUnavailableError("The disk is full."))
                await clock.advance(1.0)
                for process in [one for one in world.network.processes.values() if one.alive]:
                    world.end_process(process)
            assert 8 <= world.inner.count("start") <= 20


class TestChangeOfLeader:
    @pytest.mark.proves("pooled/leader-dies-processes-work", "pooled/deposed-leader-assigns-worker")
    async def test_new_leader_lists_what_the_processes_report_and_they_ignore_the_deposed_one(self, world):
        before = [await world.start(key) for key in (A, B, C, D)]
        deposed = world.driver
        world.lead(term=4)
        assert sorted((await world.listed()).values(), key=lambda one: one.key) == before
        assert await fails(world.start(A), SlotTakenError)
        start = world.within(RULES.process_timeout + 5, deposed.start(spec_of(Key("e"))))
        assert await fails(start, DriverUnavailableError)
        assert [len(process.assigned) for process in world.network.processes.values()] == [3, 1]

    @pytest.mark.parametrize("late", [False, True])
    @pytest.mark.proves("pooled/process-answer-new-leader", "pooled/process-answers-new-leader")
    async def test_nothing_is_placed_before_all_processes_have_answered_or_were_killed(self, world, late):
        silent, *_ = [world.process_of(await world.start(key)) for key in (A, B, C, D)]
        silent.mute = True
        world.lead(term=4)
        listing, start = asyncio.ensure_future(world.driver.list_instances()), world.begin(Key("e"))
        await world.clock.advance(RULES.process_timeout - 2)
        assert not (listing.done() or start.done())
        assert silent.worker_id in world.running_processes()
        silent.mute = not late
        await world.clock.advance(5.0)
        assert {one.key for one in await done(listing)} == ({A, B, C, D} if late else {D})
        await done(start)
        assert (silent.worker_id in world.running_processes()) is late

    @pytest.mark.proves("pooled/assignment-answered")
    async def test_assign_of_an_earlier_term_counts_until_the_process_has_answered_the_present_one(self, world, clock):
        await world.start(A)
        world.network.lose = lambda question: isinstance(question, Assign)
        lost = world.begin(B)
        await clock.advance(2.0)
        world.driver.end_term()
        for call in (world.driver.list_instances(), world.driver.start(spec_of(C))):
            assert await fails(call, DriverUnavailableError), "there is no term"
        await clock.advance(2.0)
        assert await fails(done(lost), DriverUnavailableError)
        world.driver.begin_term(PlayedLink(world.network.ask, term=4))
        assert (await world.listed()).keys() == {A}

    async def test_deposed_leader_uses_no_process_that_the_next_one_may_have_started(self, clock):
        """lifecycle: pooled-late-process."""
        with world_of(clock, ready=False) as world:
            start = world.begin(A)
            await clock.advance(2.0)
            [process] = world.network.processes.values()
            seen_at = world.driver.processes[process.worker_id].seen_at
            world.link.leads = False
            process.set(ready=True)
            await clock.advance(1.0)
            assert await fails(done(start), LeadershipLostError)
            assert world.link.confirmed[-1] == seen_at
            assert not [question for question in world.network.sent if isinstance(question, Assign)]

    @pytest.mark.parametrize("seems", ["empty", "silent"])
    @pytest.mark.proves("pooled/deposed-leader-finds-process")
    async def test_deposed_leader_ends_no_process(self, world, seems):
        """It answers the latest leader only, which may have placed a worker in it."""
        instance = await world.start(A)
        if seems == "empty":
            await world.end(instance)
        world.process_of(instance).mute = seems == "silent"
        world.link.leads = False  # that the token channel answered before is no proof
        await world.clock.advance(max(EMPTY_FOR, 3 * RULES.process_timeout) + 20)
        assert world.running_processes() == [world.process_of(instance).worker_id]
        await fails(done(world.tasks[0]), ExceptionGroup)

    async def test_older_listing_does_not_bring_back_a_process_that_has_ended(self, world):
        process = world.process_of(await world.start(A))
        world.inner.hang_lists()
        older = asyncio.ensure_future(world.driver.refresh())
        await world.clock.settle()
        world.end_process(process)
        newer = asyncio.ensure_future(world.driver.refresh())
        await world.clock.settle()
        world.inner.release_lists()
        await asyncio.gather(older, newer)
        assert world.driver.processes[process.worker_id].is_gone


class TestLostMessages:
    @pytest.mark.proves("pooled/assignment-answered")
    async def test_unanswered_assign_counts_as_taken(self, world):
        process = world.process_of(await world.start(A))
        world.network.lose = lambda question: isinstance(question, Assign)
        start = world.within(RULES.process_timeout + 2, world.driver.start(spec_of(B)))
        assert await fails(start, DriverUnavailableError)
        world.network.lose = lambda question: False
        assert (await world.listed())[B].state is InstanceState.RUNNING
        assert await fails(world.start(B), SlotTakenError)
        await world.end((await world.listed())[B])
        assert ((await world.listed()).keys(), len(process.assigned)) == ({A}, 1)

    @pytest.mark.parametrize("kind", [Assign, Release, Forget])
    @pytest.mark.proves("pooled/command-process-lost-duplicated")
    async def test_lost_question_is_repeated(self, world, kind):
        left = [True] * 3
        world.network.lose = lambda question: isinstance(question, kind) and bool(left) and left.pop()
        await world.end(await world.within(6.0, world.driver.start(spec_of(A))))
        assert (left, await world.listed()) == ([], {})

    @pytest.mark.proves("pooled/report-process-lost", "pooled/rabbitmq-blocks-publishers-long")
    async def test_blocked_rabbitmq_kills_no_process_and_a_lost_report_of_an_end_is_asked_for(self, world, clock):
        process, ends = world.process_of(await world.start(A)), await world.start(B)
        process.mute, world.link.accepts = True, False
        process.end_worker(ends.worker_id, 3)
        await clock.advance(600.0)
        assert world.running_processes() == [process.worker_id]
        process.mute, world.link.accepts = False, True
        await clock.advance(5.0)
        listed = await world.listed()
        assert (listed[A].state, listed[B].exit) == (InstanceState.RUNNING, Exit(code=3, shared=True))


async def die_together(world: World, *working: Key, suspect: bool = False) -> None:
    """The workers of A and B share a process, which ends while these keys have requests at work. `suspect`: that of A
    has failed before."""
    instances = {key: await world.start(key) for key in (A, B)}
    process = world.process_of(instances[A])
    for key in working:
        process.use(instances[key].worker_id, in_flight=1)
    if suspect:
        world.link.suspects.add(instances[A].worker_id)
    await world.clock.advance(1.0)
    world.end_process(process)
    await world.clock.advance(1.0)
    for instance in instances.values():
        await world.driver.remove(instance.instance_id)


async def place_alone(world: World) -> tuple[Instance, Instance]:
    """A is placed alone, and the other keys together: (worker of A, worker of B)."""
    innocent, culprit, third = [await world.start(key) for key in (B, A, C)]
    assert world.process_of(culprit).assigned == [culprit.worker_id]
    assert world.process_of(third) is world.process_of(innocent)
    return culprit, innocent


class TestProcessEnds:
    @pytest.mark.parametrize("stopped", [False, True], ids=["", "sooner for a worker that must stop"])
    @pytest.mark.proves("pooled/process-answer")
    async def test_silent_process_is_killed_and_its_workers_are_exited_then(self, world, stopped):
        instance, _ = await world.start(A), await world.start(B)
        world.process_of(instance).mute = True
        if stopped:
            await world.within(RULES.process_timeout + 2, world.driver.stop(instance.instance_id, grace=1.0))
        else:
            await world.clock.advance(RULES.process_timeout)
            assert [one.state for one in (await world.listed()).values()] == [InstanceState.RUNNING] * 2
            await world.clock.advance(2 * RULES.process_timeout)
        assert [one.state for one in (await world.listed()).values()] == [InstanceState.EXITED] * 2

    @pytest.mark.proves("pooled/process-ends-killed-out")
    async def test_end_of_a_process_ends_all_its_workers_with_its_exit(self, world, clock):
        instances = [await world.start(key) for key in (A, B, C)]
        other = await world.start(D)
        world.end_process(world.process_of(instances[0]))
        listed = await world.listed()
        end_of_a = Exit(code=137, reason="the process ended: out of memory", shared=True, of_process=True)
        assert [listed[key].exit for key in (A, B, C)] == [end_of_a] * 3
        assert listed[D] == other
        for instance in instances:
            await world.driver.remove(instance.instance_id)
        await clock.advance(2.0)
        assert (await world.listed()).keys() == {D}
        assert len(world.backend.workers) == 1

    @pytest.mark.proves("api/viewer-one-key-asks")
    async def test_logs_of_a_worker_never_hold_lines_of_another_key(self, world, clock):
        """A process writes one log for all its keys, and a viewer may be limited to one of them."""
        a, b = await world.start(A), await world.start(B)
        process = world.process_of(a)
        worker_a, worker_b = (str(one.worker_id) for one in (a, b))
        own = [json.dumps({"event": f"line {number} of a", "worker_id": worker_a}) for number in range(3)]
        others = [
            json.dumps({"event": f"beside {worker_a}", "worker_id": worker_b}),
            json.dumps({"event": "of a nested worker", "more": {"worker_id": worker_a}}),
            json.dumps([{"worker_id": worker_a}]),
            f"a line of print() about {worker_a}",
            "[" * 100_000 + worker_a,
        ]
        process.set(assignments=tuple(replace(one, log_lines=()) for one in process.state.assignments))
        await clock.advance(1.0)
        world.write(process, *others, *own, *others)
        for _ in range(2):  # also after the end of the process
            assert await world.driver.logs(a.instance_id) == tuple(own)
            assert await world.driver.logs(a.instance_id, lines=2) == tuple(own[1:])
            assert await world.driver.logs(b.instance_id) == (others[0],) * 2
            assert set(others) < set(await world.driver.process_logs(process.worker_id, lines=100))
            world.end_process(process)
            await world.listed()

    async def test_worker_assigned_to_a_dying_process_is_started_again(self, world, clock):
        process = world.process_of(await world.start(A))
        world.network.lose = lambda question: isinstance(question, Assign)
        start = world.begin(B)
        await clock.advance(2.0)
        world.end_process(process)
        await clock.advance(2.0)
        assert await fails(done(start), DriverUnavailableError)
        world.network.lose = lambda question: False
        unanswered = (await world.listed())[B]
        assert unanswered.exit == Exit(code=137, reason="the process ended: out of memory", of_process=True)
        await world.driver.remove(unanswered.instance_id)
        assert (await world.start(B)).state is InstanceState.RUNNING

    @pytest.mark.proves("pooled/requests-one-key-end")
    async def test_key_whose_requests_ran_at_two_ends_gets_a_process_of_its_own(self, world):
        for _ in range(2):
            await die_together(world, A)
        culprit, innocent = await place_alone(world)
        await world.end(culprit)
        await world.clock.advance(3600.0)
        assert world.process_of(await world.start(A)) is world.process_of(innocent)

    @pytest.mark.proves("pooled/request-ends-each-process")
    async def test_key_whose_suspect_ran_is_placed_alone_after_a_change_of_leader(self, world):
        """The second leader has not seen the first end: that the request is a suspect shows that there was one."""
        await die_together(world, A, B)
        world.close()
        world.driver.end_term()
        world.lead(term=4)
        await die_together(world, A, B, suspect=True)
        await place_alone(world)

    @pytest.mark.proves("pooled/jvm-process-ends-process")
    async def test_key_whose_suspect_ran_when_the_jvm_was_lost_is_placed_alone(self, world):
        """Its worker ends first, and the process after it."""
        instances = [await world.start(key) for key in (A, B)]
        process = world.process_of(instances[0])
        world.link.suspects.add(instances[0].worker_id)
        for instance in instances:
            process.end_worker(instance.worker_id, 4, "the session is gone")
        await world.clock.advance(1.0)
        listed = (await world.listed()).values()
        assert [one.exit for one in listed] == [Exit(code=4, reason="the session is gone", shared=True)] * 2
        for instance in instances:
            await world.end(instance)
        await place_alone(world)

    @pytest.mark.proves("pooled/more-keys-suspected-own")
    async def test_suspects_for_which_no_process_is_left_share_one(self, world):
        for key in (A, B, C):
            world.driver.deaths.blame(key)
        alone, *others = [world.process_of(await world.start(key)) for key in (A, B, C, D)]
        assert len(alone.assigned) == 1
        assert len({id(other) for other in others}) == 1

    @pytest.mark.proves("pooled/process-become-ready")
    async def test_process_that_does_not_become_ready_is_killed(self, clock):
        with world_of(clock, replace(RULES, spares=1), ready=False) as world:
            await clock.advance(RULES.start_timeout - 5)
            [first] = world.running_processes()
            await clock.advance(10.0)
            assert first not in world.running_processes()


class TestReplacement:
    @pytest.mark.parametrize("rule", [{"max_requests": 100}, {"max_age": 600.0}, {}], ids=str)
    @pytest.mark.proves("pooled/process-leaks-memory-threads")
    async def test_process_beyond_its_age_or_requests_or_without_room_is_replaced(self, clock, rule):
        with world_of(clock, replace(RULES, **rule)) as world:
            instance = await world.start(A)
            process = world.process_of(instance)
            assert not (await world.listed())[A].retiring
            process.set(requests=100, draining=not rule)
            await clock.advance(600.0)
            assert (await world.listed())[A].retiring
            successor = await world.start(A, slot=1)
            assert (successor.retiring, world.process_of(successor) is process) == (False, False)
            await world.end(instance)
            await clock.advance(5.0)
            assert world.running_processes() == [world.process_of(successor).worker_id]

    @pytest.mark.proves("pooled/live-heap-process-grows")
    async def test_process_whose_live_heap_grows_with_the_same_keys_is_replaced(self, world):
        process = world.process_of(await world.start(A))
        for share in (0.10, 0.11, 0.12, 0.19, 0.30, 0.31, 0.30):
            await world.clock.advance(300.0)
            process.set_live_heap(share)
            if share == 0.19:
                await world.clock.advance(2.0)
                assert not (await world.listed())[A].retiring, "a small growth"
                await world.end(await world.start(B))  # counts anew
        await world.start(B)
        for share in (0.50, 0.50, 0.51, 0.62):  # another key needs more; it loads its data after its start
            process.set_live_heap(share)
            await world.clock.advance(SETTLE + 1)
        assert not (await world.listed())[A].retiring
        process.set_live_heap(0.67)
        await world.clock.advance(2.0)
        assert [one.retiring for one in (await world.listed()).values()] == [True, True]
        assert world.process_of(await world.start(A, slot=1)) is not process

    @pytest.mark.proves("pooled/placement-running-pool-changed")
    async def test_dedicated_workers_of_a_former_placement_are_listed_and_stopped(self, world, clock):
        dedicated = world.backend.add(spec_of(A), spec_hash="spec", started_at=clock.time()).instance
        assert await world.listed() == {A: dedicated}
        assert dedicated.spec_hash != world.driver.spec_hash()
        assert await fails(world.start(A), SlotTakenError)
        await world.driver.stop(dedicated.instance_id, grace=1.0)
        assert (await world.listed())[A].state is InstanceState.EXITED
        await world.driver.remove(dedicated.instance_id)
        assert await world.listed() == {}


class TestMemoryPressure:
    @pytest.mark.proves("pooled/host-cgroup-process-short")
    async def test_spares_end_and_none_is_started_while_the_host_is_short_of_memory(self, clock):
        with world_of(clock, replace(RULES, spares=1)) as world:
            process = world.process_of(await world.start(A))
            await clock.advance(5.0)
            assert len(world.running_processes()) == 2
            for one in world.network.processes.values():
                one.set_memory_limit(0.9)
            await clock.advance(5.0)
            assert world.running_processes() == [process.worker_id]
            assert world.process_of(await world.start(B)) is process
            process.set_memory_limit(0.82)  # not yet
            await clock.advance(60.0)
            assert world.running_processes() == [process.worker_id]
            process.set_memory_limit(0.79)
            await clock.advance(5.0)
            assert len(world.running_processes()) == 2

    @pytest.mark.parametrize("limit", [RULES.max_memory_used, None])
    async def test_key_without_room_on_a_short_host_fails_and_names_the_memory(self, clock, limit):
        with world_of(clock, replace(RULES, keys_per_process=1, max_memory_used=limit)) as world:
            world.process_of(await world.start(A)).set_memory_limit(0.99)
            await clock.advance(5.0)
            start = world.within(RULES.start_timeout + 1, world.driver.start(spec_of(B)))
            if limit is None:
                assert (world.driver.shortages(), (await start).key) == ([], B)
            else:
                assert "worker.pooled.max_memory_used" in await fails(start, StartFailedError)
                assert len(world.running_processes()) == 1

    async def test_shortage_names_the_idle_workers_of_its_own_host_or_cgroup(self, clock):
        with world_of(clock, replace(RULES, keys_per_process=2)) as world:
            of_a, of_b, of_c = [await world.start(key) for key in (A, B, C)]
            first, other = world.process_of(of_a), world.process_of(of_c)

            async def shortages():
                await clock.advance(1.0)
                return [(one.scope, [worker.key for worker in one.idle]) for one in world.driver.shortages()]

            first.set_memory_limit(0.84, scope="cgroup 1")
            other.set_memory_limit(0.5, scope="cgroup 2")
            assert await shortages() == []
            first.set_memory_limit(0.85, scope="cgroup 1")
            first.use(of_a.worker_id, in_flight=0)
            first.use(of_b.worker_id, in_flight=0, last_used=clock.time() - 10)
            assert await shortages() == [("cgroup 1", [B, A])]
            first.use(of_b.worker_id, in_flight=1)
            assert await shortages() == [("cgroup 1", [A])]

    async def test_old_process_alone_in_its_cgroup_is_replaced(self, world, clock):
        process = world.process_of(await world.start(A))
        process.set_memory_limit(0.9, scope="cgroup 1")
        await clock.advance(1.0)
        assert not world.driver.replace_one("cgroup 1")
        await clock.advance(600.0)
        assert world.driver.replace_one("cgroup 1")
        assert world.process_of(await world.start(A, slot=1)) is not process


BIG: Mapping[str, object] = {"spark": {"conf": {"spark.driver.memory": "8g"}}}


def use(world: World, *, pool: int = 0, big: int = 0) -> None:
    """The pool has processes of two settings, with so many spares each."""
    of_profile = ProcessSettings(world.inner.spec_hash(BIG), big, BIG, "big/{n}")
    world.driver.use_settings([ProcessSettings(world.inner.spec_hash(), pool), of_profile])


def running_hashes(world: World) -> list[str]:
    """The hashes of the settings of all running processes."""
    instances = [worker.instance for worker in world.backend.workers.values()]
    return sorted(one.spec_hash for one in instances if one.state is InstanceState.RUNNING)


async def begin_big(world: World, key: Key, slot: int = 0) -> asyncio.Future[Instance]:
    """A start of a worker with the settings of a profile."""
    spec = replace(spec_of(key, slot), spec_hash=world.driver.spec_hash(BIG))
    task = asyncio.ensure_future(world.driver.start(spec))
    await world.clock.advance(1.0)
    return task


class TestProfiles:
    async def test_next_leader_knows_the_settings_of_the_processes_that_it_finds(self, world):
        use(world)
        first = world.process_of(await done(await begin_big(world, A)))
        world.lead(term=4)
        use(world)
        await world.listed()
        assert world.process_of(await done(await begin_big(world, B))) is first
        assert world.process_of(await world.start(C)) is not first

    @pytest.mark.proves("pooled/max-processes-processes-run")
    async def test_each_settings_have_spares_of_their_own_which_end_when_their_place_is_needed(self, clock):
        with world_of(clock, replace(RULES, keys_per_process=1)) as world:
            use(world, pool=2, big=1)
            await clock.advance(5.0)
            own, big = world.inner.spec_hash(), world.inner.spec_hash(BIG)
            assert running_hashes(world) == sorted([own, own, big])
            for key in (A, B):
                await world.within(10.0, await begin_big(world, key))
            assert running_hashes(world) == sorted([own, big, big])

    @pytest.mark.proves("pooled/processes-one-profile-start")
    async def test_processes_that_do_not_start_fail_the_workers_of_their_settings_only(self, clock):
        with world_of(clock, ready=False) as world:
            use(world)
            healthy, broken = world.begin(B), await begin_big(world, A)
            big = world.inner.spec_hash(BIG)
            for _ in range(RULES.start_attempts):
                await clock.advance(5.0)
                for worker in [one.instance for one in world.backend.workers.values()]:
                    if (worker.spec_hash, worker.state) == (big, InstanceState.RUNNING):
                        world.end_process(world.network.processes[worker.worker_id])
            await clock.advance(5.0)
            assert await fails(broken, StartFailedError)
            assert not healthy.done()
            for process in world.network.processes.values():
                process.set(ready=True)
            await clock.advance(1.0)
            assert (await done(healthy)).key == B

    @pytest.mark.parametrize("ready", [True, False])
    @pytest.mark.proves("pooled/profiles-changed-worker-waits")
    async def test_processes_of_settings_that_are_gone_get_no_workers_and_end_when_empty(self, clock, ready):
        with world_of(clock, ready=ready) as world:
            use(world)
            old = await begin_big(world, A)
            world.driver.use_settings([ProcessSettings(world.inner.spec_hash(), 0)])
            await clock.advance(1.0)
            if ready:
                assert await fails(await begin_big(world, B), DriverUnavailableError)
                await world.end(await done(old))
            else:  # the pool repeats the start
                await fails(old, DriverUnavailableError)
            await clock.advance(EMPTY_FOR)
            assert world.running_processes() == []

    async def test_worker_with_a_process_of_its_own_holds_its_slot(self, world, clock):
        use(world)
        spec = replace(spec_of(A), spec_hash=world.inner.spec_hash(), placement=Placement.DEDICATED)
        instance = await world.within(1.0, world.driver.start(spec))
        assert (instance.key, split_id(instance.instance_id)) == (A, None)
        assert await fails(world.start(A), SlotTakenError)
        assert (await world.listed())[A] == instance
        assert world.process_of(await world.start(A, slot=1))
