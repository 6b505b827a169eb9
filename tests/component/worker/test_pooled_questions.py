"""A pooled process and the leader's questions, in virtual time: the test ends the workers, and there is no RabbitMQ."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import pytest
from structlog.testing import capture_logs
from worker_bench import environment

from osrdyne.protocol.activity import PROCESS_START_PARTS, ActivityReport, Event, cold_start_of
from osrdyne.protocol.control import Command, ControlMessage, Generation
from osrdyne.protocol.environment import Placement, WorkerEnvironment
from osrdyne.protocol.names import WorkerId
from osrdyne.protocol.pooled import (
    PROCESS_KEY,
    STATE_INTERVAL,
    Assign,
    Assignment,
    AssignmentExit,
    AssignmentState,
    Drain,
    Forget,
    ProcessMemory,
    ProcessState,
    Question,
    Release,
    ReportState,
    process_state_of,
    question_to_control,
)
from osrdyne.testing.clock import VirtualClock
from osrdyne_worker.pooled import process as module
from osrdyne_worker.pooled.log_lines import LogLines
from osrdyne_worker.pooled.process import PooledProcess
from osrdyne_worker.runtime.control import FORGED_INTERVAL
from osrdyne_worker.runtime.exit import ExitCode, ExitReason, StartFailed, Stop, Unrecoverable
from osrdyne_worker.runtime.loop_watchdog import Blocked
from osrdyne_worker.runtime.ready_file import NO_READY_FILE
from osrdyne_worker.runtime.reports import Reporter
from osrdyne_worker.runtime.settings import RuntimeSettings
from osrdyne_worker.runtime.start_times import StartTimes

A, B = WorkerId("a"), WorkerId("b")
TERM = 5


class FakeWorker:
    """A worker that ends when the test says so; a `willing` one also when it is asked to."""

    def __init__(self, worker_id: WorkerId, *, willing: bool) -> None:
        self.worker_id, self.willing = worker_id, willing
        self.in_flight, self.requests, self.left_behind, self.last_used = 2, 3, 0, 0.0
        self.requested: list[ExitReason] = []
        self.blocked: list[Blocked] = []
        self.ended: asyncio.Future[AssignmentExit] = asyncio.get_running_loop().create_future()

    async def run(self) -> AssignmentExit:
        return await self.ended

    def request_exit(self, reason: ExitReason) -> None:
        self.requested.append(reason)
        if self.willing:
            self.end(AssignmentExit(reason.code))

    def report_blocked(self, blocked: Blocked) -> None:
        self.blocked.append(blocked)

    async def cut_off(self, reason: str) -> None:
        self.end(AssignmentExit(ExitCode.UNRECOVERABLE, reason))

    def end(self, how: AssignmentExit) -> None:
        if not self.ended.done():
            self.ended.set_result(how)


@dataclass
class FakeHost:
    willing: bool = True
    made: dict[WorkerId, FakeWorker] = field(default_factory=dict)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    lost: str | None = None
    failure: Exception | None = None
    closed: bool = False

    async def start(self) -> None:
        await self.started.wait()
        if self.failure is not None:
            raise self.failure

    def start_times(self) -> Mapping[str, float]:
        return {"jvm": 2.5, "warm_up": 0.5}

    def make_worker(self, environment: WorkerEnvironment) -> FakeWorker:
        if environment.key == "broken":
            raise ValueError("no such key")
        worker = self.made[environment.worker_id] = FakeWorker(environment.worker_id, willing=self.willing)
        return worker

    async def loss(self) -> str | None:
        return self.lost

    async def memory(self) -> ProcessMemory:
        return ProcessMemory(10, 20, 30, 40)

    async def executor_seconds(self) -> float | None:
        return 1.5

    async def close(self) -> None:
        self.closed = True


class RecordingReporter(Reporter):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(key=PROCESS_KEY, worker_id=WorkerId("process"), exchange="activity", clock=clock)
        self.sent: list[ActivityReport] = []

    def report(self, event: Event, **details: object) -> None:
        self.sent.append(ActivityReport(PROCESS_KEY, event, "process", details))

    def report_apart(self, uri: str, event: Event, **details: object) -> None:
        self.report(event, **details)


class ProcessEnded(Exception):
    """The process has exited."""


class Bench:
    """The process, and what the leader sees of it."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.host = FakeHost()
        self.reporter = RecordingReporter(self.clock)
        self.exits: list[ExitReason] = []
        self.process = PooledProcess(
            environment("process", PROCESS_KEY, requests_queues=(), placement=Placement.POOLED),
            host=self.host,
            settings=RuntimeSettings(stop_grace=0.2),
            reporter=self.reporter,
            ready_file=NO_READY_FILE,
            log_lines=LogLines(),
            start_times=StartTimes(),
            clock=self.clock,
        )
        self.running: asyncio.Task[None] | None = None
        self._questions = 0

    def exit(self, reason: ExitReason) -> NoReturn:
        self.exits.append(reason)
        raise ProcessEnded

    async def start(self, *, is_up: bool = True) -> None:
        self.running = asyncio.create_task(self.process.run(self.exit))
        if is_up:
            self.host.started.set()
        await self.clock.settle()

    async def ask(self, question: Question, *, term: int = TERM, times: int = 1) -> ProcessState:
        """The state that answers; asked several times, RabbitMQ has doubled the question."""
        for _ in range(times):
            self.process.handle(question_to_control(question, Generation(term, 1)))
        await self.clock.settle()
        return self.state

    async def assign(
        self, worker_id: str, key: str = "k", *, slot: int = 0, term: int = TERM, times: int = 1
    ) -> ProcessState:
        question = Assign(f"assign {worker_id}", environment(worker_id, key), slot, "hash", 1.0)
        return await self.ask(question, term=term, times=times)

    async def release(self, worker_id: str, *, grace: float = 10.0, times: int = 1) -> ProcessState:
        return await self.ask(Release(f"release {worker_id}", WorkerId(worker_id), grace), times=times)

    @property
    def states(self) -> list[ProcessState]:
        return [process_state_of(report) for report in self.reporter.sent if report.event is Event.PROCESS_STATE]

    @property
    def state(self) -> ProcessState:
        return self.states[-1]

    @property
    def listed(self) -> dict[str, str]:
        return {one.worker_id: str(one.state) for one in self.state.assignments}

    def assignment(self, worker_id: str) -> Assignment:
        return next(one for one in self.state.assignments if one.worker_id == worker_id)

    def exit_of(self, worker_id: str) -> AssignmentExit:
        found = self.assignment(worker_id).exit
        assert found is not None
        return found

    async def assign_all(self, *worker_ids: str) -> None:
        """Each to a key of its own name."""
        for worker_id in worker_ids:
            await self.assign(worker_id, worker_id)

    async def end(self, worker_id: WorkerId, how: AssignmentExit) -> None:
        self.host.made[worker_id].end(how)
        await self.clock.settle()

    def events(self) -> list[Event]:
        return [report.event for report in self.reporter.sent]

    async def until_exit(self) -> ExitReason:
        assert self.running is not None
        with pytest.raises(BaseExceptionGroup):
            await self.running
        return self.exits[0]


@pytest.fixture
async def idle(monkeypatch):
    """A process whose session is not up yet, and that is not connected."""

    async def never(_):
        await asyncio.Event().wait()

    monkeypatch.setattr(module, "connect", never)
    monkeypatch.setattr(RecordingReporter, "flushed", lambda _: asyncio.sleep(0))
    bench = Bench()
    yield bench
    if bench.running is not None and not bench.running.done():
        bench.running.cancel()
        await asyncio.wait({bench.running})


@pytest.fixture
async def bench(idle):
    await idle.start()
    return idle


async def test_forged_messages_fill_no_log(bench):
    """Their term is years ahead. Clients can send any number of them to the control queue."""
    forged = question_to_control(ReportState("q"), Generation(2**40, 1))
    with capture_logs() as logs:
        for _ in range(3):
            bench.process.handle(forged)
        await bench.clock.advance(FORGED_INTERVAL)
        bench.process.handle(forged)
    assert [entry["messages"] for entry in logs if "forged" in entry["event"]] == [1, 4]


async def test_process_reports_that_it_is_ready_with_its_memory_and_the_parts_of_its_start(bench):
    assert bench.events()[0] is Event.STARTED
    state = await bench.ask(ReportState("q1"))
    assert (state.ready, state.draining, state.answers, state.term) == (True, False, ("q1",), TERM)
    assert (state.memory, state.executor_seconds) == (ProcessMemory(10, 20, 30, 40), 1.5)
    assert state.cold_start.items() >= {"jvm": 2500, "warm_up": 500}.items()
    [ready] = [report for report in bench.reporter.sent if report.event is Event.READY]
    assert cold_start_of(ready, known=PROCESS_START_PARTS).keys() == {"session", "jvm", "warm_up", "ready"}
    before = len(bench.states)
    await bench.clock.advance(3 * STATE_INTERVAL)
    assert [state.sequence for state in bench.states] == list(range(1, before + 4))


async def test_assigned_worker_is_reported_until_it_is_released_within_its_grace_and_forgotten(bench):
    state = await bench.assign("a", "k", slot=2)
    [one] = state.assignments
    assert (one.key, one.slot, one.spec_hash, one.generation) == ("k", 2, "hash", (TERM, 1))
    assert (one.state, one.last_used) == (AssignmentState.RUNNING, bench.clock.time())
    await bench.ask(ReportState("later"))
    assert (bench.assignment(A).in_flight, bench.state.requests) == (2, 3)
    await bench.release("a", grace=7.0, times=2)
    assert bench.host.made[A].requested[0] == Stop(7.0)
    assert bench.listed == {A: "exited"}
    assert bench.exit_of(A) == AssignmentExit(ExitCode.STOPPED)
    state = await bench.ask(Forget("forget a", A))
    assert (state.assignments, state.requests) == ((), 3)
    assert "s3cret" not in str(bench.reporter.sent)


@pytest.mark.parametrize("graces", [[20.0], [100.0, 20.0]], ids=["one release", "a later one with less"])
@pytest.mark.proves("pooled/requests-released-worker-end")
async def test_worker_that_does_not_stop_is_cut_off_after_its_grace(bench, graces):
    bench.host.willing = False
    await bench.assign_all("a", "b")
    for grace in graces:
        await bench.release("a", grace=grace)
    await bench.clock.advance(20.0)
    assert bench.listed == {A: "stopping", B: "running"}
    await bench.clock.advance(module.CUT_OFF_DELAY)
    assert bench.listed == {A: "exited", B: "running"}
    assert bench.exit_of(A).code == ExitCode.UNRECOVERABLE


async def test_message_of_an_older_term_is_ignored_and_not_answered(bench):
    await bench.assign("a", term=7)
    before = len(bench.states)
    for question in (Release("old", A, 1.0), ReportState("old")):
        bench.process.handle(question_to_control(question, Generation(6, 99)))
    await bench.clock.settle()
    assert (len(bench.states), bench.host.made[A].requested) == (before, [])
    assert (await bench.ask(ReportState("new"), term=8)).term == 8


async def test_malformed_assign_is_refused_with_the_field_and_without_a_value(bench):
    details = {"id": "q", "worker": {"worker_id": "a", "key": "k", "variables": {"WORKER_AMQP_URI": "s3cret"}}}
    bench.process.handle(ControlMessage(Command.ASSIGN, Generation(TERM, 1), details))
    await bench.clock.settle()
    [refusal] = bench.state.refused
    assert (refusal.worker_id, bench.state.answers, bench.state.term) == (A, ("q",), TERM)
    assert "assign.worker.slot" in refusal.reason
    assert "s3cret" not in str(bench.reporter.sent)


@pytest.mark.proves("pooled/worker-one-key-start")
async def test_worker_that_cannot_be_made_or_started_ends_alone_with_the_reason(bench):
    await bench.assign_all("broken", "a", "b")
    await bench.end(A, AssignmentExit(ExitCode.START_FAILED, "no data"))
    assert bench.listed == {"broken": "exited", A: "exited", B: "running"}
    broken = bench.exit_of("broken")
    assert (broken.code, "ValueError" in str(broken.reason)) == (ExitCode.UNRECOVERABLE, True)
    assert bench.exit_of(A) == AssignmentExit(ExitCode.START_FAILED, "no data")
    assert bench.exits == []


class TestBeforeTheSessionIsUp:
    @pytest.fixture
    async def bench(self, idle):
        await idle.start(is_up=False)
        return idle

    async def test_worker_waits_for_the_session_and_one_that_is_released_meanwhile_never_runs(self, bench):
        await bench.assign_all("a", "b")
        assert (bench.state.ready, bench.host.made, bench.listed) == (False, {}, {A: "running", B: "running"})
        await bench.release("a")
        assert bench.listed == {A: "exited", B: "running"}
        bench.host.started.set()
        await bench.clock.settle()
        assert list(bench.host.made) == [B]

    async def test_session_that_cannot_be_built_ends_the_process_with_the_reason(self, bench):
        await bench.assign("a")
        bench.host.failure = ValueError("no Java")
        bench.host.started.set()
        reason = await bench.until_exit()
        assert isinstance(reason, StartFailed)
        assert "ValueError" in reason.reason


class TestEnd:
    async def test_drained_process_takes_nothing_more_and_ends_after_its_last_worker(self, bench):
        await bench.assign("a")
        state = await bench.ask(Drain("drain"))
        assert (state.draining, state.answers, bench.listed) == (True, ("drain",), {A: "running"})
        state = await bench.assign("b", "other")
        assert [one.worker_id for one in state.refused] == [B]
        await bench.release("a")
        assert await bench.until_exit() == Stop(None)
        assert bench.listed == {A: "exited"}
        assert bench.host.closed

    async def test_empty_process_that_is_drained_ends(self, bench):
        bench.process.handle(ControlMessage(Command.DRAIN, Generation(TERM, 1)))
        assert await bench.until_exit() == Stop(None)

    @pytest.mark.parametrize("willing", [True, False])
    async def test_stopped_process_stops_all_workers_and_cuts_off_what_does_not_stop(self, bench, willing):
        bench.host.willing = willing
        await bench.assign_all("a", "b")
        bench.process.stop()
        assert await bench.until_exit() == Stop(0.2)
        assert bench.listed == {A: "exited", B: "exited"}
        assert [worker.requested for worker in bench.host.made.values()] == [[Stop(0.1)]] * 2
        assert bench.exit_of(A).code == (ExitCode.STOPPED if willing else ExitCode.UNRECOVERABLE)

    @pytest.mark.parametrize("when", ["a report of the state is due", "a worker fails"])
    @pytest.mark.proves("pooled/jvm-process-ends-during")
    async def test_lost_session_ends_the_process_and_all_its_workers(self, bench, when):
        await bench.assign_all("a", "b")
        bench.host.lost = "The JVM is gone."
        if when == "a worker fails":
            bench.host.made[A].end(AssignmentExit(ExitCode.UNRECOVERABLE, "session lost"))
        else:
            await bench.clock.advance(STATE_INTERVAL)
        assert await bench.until_exit() == Unrecoverable("The JVM is gone.")
        assert bench.listed == {A: "exited", B: "exited"}
        assert Event.FAILED in bench.events()

    @pytest.mark.proves("pooled/handler-blocks-event-loop")
    async def test_end_of_a_blocked_loop_is_reported_for_the_key_that_blocks(self, bench):
        await bench.assign_all("a", "b")
        blocked = Blocked("blocked by a", (), key="a", worker_id=A)
        with pytest.raises(ProcessEnded):
            bench.process.end_blocked(bench.exit, blocked)
        assert {name: worker.blocked for name, worker in bench.host.made.items()} == {A: [blocked], B: []}
        assert [one.details for one in bench.reporter.sent if one.event is Event.FAILED] == [{"reason": "blocked by a"}]
        assert bench.exits == [Unrecoverable("blocked by a")]

    @pytest.mark.proves("pooled/more-8-threads-ended")
    async def test_process_with_too_many_threads_left_behind_takes_nothing_more(self, bench):
        await bench.assign_all("a", "b")
        bench.host.made[A].left_behind = module.MAX_LEFT_BEHIND
        await bench.end(A, AssignmentExit(ExitCode.UNRECOVERABLE, "stuck"))
        await bench.clock.advance(module.LEFT_BEHIND_AFTER + STATE_INTERVAL)
        assert not bench.state.draining
        bench.host.made[A].left_behind += 1
        await bench.clock.advance(STATE_INTERVAL)
        assert (bench.state.draining, bench.listed) == (True, {A: "exited", B: "running"})

    async def test_threads_that_still_close_their_sessions_are_not_left_behind(self, bench):
        await bench.assign_all("a", "b")
        bench.host.made[A].left_behind = module.MAX_LEFT_BEHIND + 1
        await bench.end(A, AssignmentExit(ExitCode.UNRECOVERABLE, "stuck"))
        await bench.clock.advance(module.LEFT_BEHIND_AFTER - STATE_INTERVAL)
        bench.host.made[A].left_behind = 0
        await bench.clock.advance(module.LEFT_BEHIND_AFTER)
        assert (bench.state.draining, bench.listed) == (False, {A: "exited", B: "running"})
