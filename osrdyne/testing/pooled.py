"""A pooled process that only plays its part, and links to it that lose, double and reorder messages.

For tests of the leader's side: `PlayedProcess` follows the questions of `protocol.pooled`, and its workers behave as
their configuration says (`conformance_worker.Behaviour`). `PlayedNetwork` stands for RabbitMQ.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from osrdyne.aio.clock import Clock
from osrdyne.drivers.base import WorkerSpec, new_worker_id
from osrdyne.drivers.pooled.driver import PooledDriver
from osrdyne.errors import LeadershipLostError
from osrdyne.protocol.activity import ActivityReport, report_from_wire
from osrdyne.protocol.control import Generation, control_from_wire
from osrdyne.protocol.environment import Placement, WorkerEnvironment
from osrdyne.protocol.names import PoolNames, WorkerId
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
    Refusal,
    Release,
    process_state_of,
    question_of_control,
    question_to_control,
)
from osrdyne.testing.conformance_worker import Behaviour

JOB = 0.5
"""Seconds that the job of a busy worker takes."""
CUT_OFF = 128 + 9


class PlayedProcess:
    """One process. `report` is called with each of its states."""

    def __init__(
        self,
        worker_id: WorkerId,
        clock: Clock,
        report: Callable[[ProcessState], None],
        *,
        ready: bool = True,
        interval: float = STATE_INTERVAL,
    ) -> None:
        self.worker_id = worker_id
        self.alive = True
        self.mute = False
        """It neither reads questions nor reports."""
        self.assigned: list[WorkerId] = []
        """The workers that it has started, in their order."""
        self.state = ProcessState(sequence=0, ready=ready, started_at=clock.time())
        self._clock = clock
        self._report = report
        self._interval = interval
        self._behaviours: dict[WorkerId, Behaviour] = {}
        self._seen: set[WorkerId] = set()

    def begin(self) -> None:
        """Report, now and at intervals."""
        if self.alive:
            self.say()
            self._clock.call_later(self._interval, self.begin)

    def say(self, *answers: str) -> None:
        self.state = replace(self.state, sequence=self.state.sequence + 1, answers=answers)
        if self.alive and not self.mute:
            self._report(self.state)

    def set(self, **changes: object) -> None:
        """Change the state, and report it."""
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]
        self.say()

    def use(self, worker_id: WorkerId, *, in_flight: int, last_used: float | None = None) -> None:
        """A worker runs so many requests."""
        used = self._clock.time() if last_used is None else last_used
        self._change(worker_id, in_flight=in_flight, last_used=used)
        self.say()

    def set_heap(self, share: float) -> None:
        self.set(memory=ProcessMemory(heap_used=int(share * 1000), heap_max=1000, rss=2000, pss=1500))

    def end_worker(self, worker_id: WorkerId, code: int = CUT_OFF, reason: str | None = None) -> None:
        """A worker ends by itself."""
        self._end(worker_id, code, reason)
        self.say()

    def take(self, question: Question, generation: Generation) -> None:
        """Follow a question of the leader, unless a later leader has sent one before."""
        if not self.alive or self.mute or generation.term < self.state.term:
            return
        self.state = replace(self.state, term=generation.term)
        match question:
            case Assign():
                self._assign(question, generation)
            case Release(worker_id=worker_id, grace=grace):
                self._release(worker_id, grace)
            case Forget(worker_id=worker_id):
                self._seen.add(worker_id)
                left = tuple(one for one in self.state.assignments if one.worker_id != worker_id)
                refused = tuple(one for one in self.state.refused if one.worker_id != worker_id)
                if (worker := self._find(worker_id)) is None or worker.state is AssignmentState.EXITED:
                    self.state = replace(self.state, assignments=left, refused=refused)
            case Drain():
                self.state = replace(self.state, draining=True)
        self.say(question.question)

    def _assign(self, question: Assign, generation: Generation) -> None:
        environment = question.environment
        worker_id = environment.worker_id
        if worker_id in self._seen:
            return
        self._seen.add(worker_id)
        place = (environment.key, question.slot)
        running = [one for one in self.state.assignments if one.state is not AssignmentState.EXITED]
        taken = next((one.worker_id for one in running if (one.key, one.slot) == place), None)
        if taken is not None or self.state.draining:
            refusal = Refusal(worker_id, taken, "the slot is taken" if taken else "the process ends")
            self.state = replace(self.state, refused=(*self.state.refused, refusal))
            return
        worker = Assignment(
            worker_id,
            environment.key,
            question.slot,
            question.spec_hash,
            question.started_at,
            generation,
            log_lines=_first_lines(environment),
            last_used=self._clock.time(),
        )
        self.assigned.append(worker_id)
        self.state = replace(self.state, assignments=(*self.state.assignments, worker))
        behaviour = Behaviour(str(environment.config.get("behaviour", Behaviour.RUN)))
        self._behaviours[worker_id] = behaviour
        if behaviour is Behaviour.EXIT:
            self._end(worker_id, int(str(environment.config.get("code", 0))), None)

    def _release(self, worker_id: WorkerId, grace: float) -> None:
        self._seen.add(worker_id)
        worker = self._find(worker_id)
        if worker is None or worker.state is not AssignmentState.RUNNING:
            return
        self._change(worker_id, state=AssignmentState.STOPPING)
        match self._behaviours[worker_id]:
            case Behaviour.STUBBORN:
                self._clock.call_later(grace, lambda: self.end_worker(worker_id, CUT_OFF, "it was cut off"))
            case Behaviour.BUSY:
                self._clock.call_later(min(JOB, grace), lambda: self._finish_job(worker_id))
            case _:
                self._end(worker_id, 0, None)

    def _finish_job(self, worker_id: WorkerId) -> None:
        worker = self._find(worker_id)
        if worker is not None:
            self._change(worker_id, log_lines=(*worker.log_lines, "job finished"))
            self.end_worker(worker_id, 0)

    def _end(self, worker_id: WorkerId, code: int, reason: str | None) -> None:
        worker = self._find(worker_id)
        if worker is not None and worker.state is not AssignmentState.EXITED:
            self._change(worker_id, state=AssignmentState.EXITED, exit=AssignmentExit(code, reason), in_flight=0)

    def _find(self, worker_id: WorkerId) -> Assignment | None:
        return next((one for one in self.state.assignments if one.worker_id == worker_id), None)

    def _change(self, worker_id: WorkerId, **changes: object) -> None:
        workers = tuple(
            replace(one, **changes) if one.worker_id == worker_id else one  # type: ignore[arg-type]
            for one in self.state.assignments
        )
        self.state = replace(self.state, assignments=workers)


def _first_lines(environment: WorkerEnvironment) -> tuple[str, ...]:
    """What the worker of the conformance suite prints first."""
    said = {
        "worker_id": environment.worker_id,
        "key": environment.key,
        "pool": environment.pool,
        "queue": environment.requests_queue,
        "uri_sha256": hashlib.sha256(environment.amqp_uri.encode()).hexdigest(),
        "config": dict(environment.config),
        "arguments": [],
    }
    lines = [json.dumps(said)]
    lines += [f"line {number}" for number in range(int(str(environment.config.get("lines", 0))))]
    silent = environment.config.get("behaviour") == Behaviour.SILENT
    return tuple(lines if silent else [*lines, "ready"])


@dataclass(slots=True)
class Faults:
    """How messages travel: `lost` and `doubled` are shares, `delay` the longest time in seconds on the way.
    `report_interval`: the seconds between two reports of a process."""

    lost: float = 0.0
    doubled: float = 0.0
    delay: float = 0.0
    report_interval: float = STATE_INTERVAL


class PlayedNetwork:
    """Carries questions to the processes and reports to the drivers, through the real encoding of both."""

    def __init__(self, clock: Clock, faults: Faults | None = None, *, seed: int = 0) -> None:
        self.clock = clock
        self.faults = faults or Faults()
        self.processes: dict[WorkerId, PlayedProcess] = {}
        self.drivers: list[PooledDriver] = []
        self.lose: Callable[[Question], bool] = lambda question: False
        """Which questions get lost, besides those by chance."""
        self.sent: list[Question] = []
        self._random = random.Random(seed)

    def start_process(self, worker_id: WorkerId, *, ready: bool = True) -> PlayedProcess:
        process = PlayedProcess(
            worker_id,
            self.clock,
            lambda state: self.report(worker_id, state),
            ready=ready,
            interval=self.faults.report_interval,
        )
        self.processes[worker_id] = process
        self.clock.call_later(0.0, process.begin)
        return process

    def ask(self, worker_id: WorkerId, question: Question, generation: Generation) -> None:
        self.sent.append(question)
        body = question_to_control(question, generation).wire_body()
        if not self.lose(question):
            self._carry(lambda: self._deliver(worker_id, body))

    def _deliver(self, worker_id: WorkerId, body: bytes) -> None:
        message = control_from_wire(body)
        assert message is not None
        question = question_of_control(message)
        process = self.processes.get(worker_id)
        if process is not None and question is not None:
            process.take(question, message.generation)

    def report(self, worker_id: WorkerId, state: ProcessState) -> None:
        report = state.to_report(worker_id)
        for driver in list(self.drivers):
            self._carry(lambda driver=driver: _take(driver, report))  # type: ignore[misc]

    def _carry(self, deliver: Callable[[], None]) -> None:
        faults, chance = self.faults, self._random.random()
        copies = 0 if chance < faults.lost else 2 if chance < faults.lost + faults.doubled else 1
        for _ in range(copies):
            self.clock.call_later(self._random.random() * faults.delay, deliver)


def _take(driver: PooledDriver, sent: ActivityReport) -> None:
    report = report_from_wire(routing_key=sent.key, headers=sent.wire_headers(), body=sent.wire_body())
    assert report is not None
    driver.take_state(WorkerId(report.worker_id), process_state_of(report))


class PlayedLink:
    """A `ProcessLink` over a network that is played."""

    def __init__(
        self, ask: Callable[[WorkerId, Question, Generation], None], *, term: int = 3, pool: str = "pool"
    ) -> None:
        self.term = term
        self.accepts = True
        """Whether RabbitMQ accepts messages."""
        self.leads = True
        self.confirmed: list[float | None] = []
        self.assigned: list[float] = []
        self.released: list[WorkerId] = []
        self._ask = ask
        self._pool = pool

    async def send(self, process: WorkerId, question: Question) -> bool:
        if self.accepts:
            self._ask(process, question, Generation(self.term, 1))
        return self.accepts

    async def confirm(self, *, since: float | None = None) -> None:
        """The leader leads as long as `leads`."""
        self.confirmed.append(since)
        if not self.leads:
            raise LeadershipLostError("Another leader has the token.")

    async def make_process(self, slot: int) -> WorkerSpec:
        return process_spec(slot, pool=self._pool, term=self.term)

    def release_process(self, process: WorkerId) -> None:
        self.released.append(process)

    def note_assigned(self, seconds: float) -> None:
        self.assigned.append(seconds)


def process_spec(slot: int, *, pool: str = "pool", term: int = 3) -> WorkerSpec:
    """What the pool would ask for as a process."""
    names = PoolNames(pool)
    environment = WorkerEnvironment(
        worker_id=new_worker_id(),
        key=PROCESS_KEY,
        pool=pool,
        amqp_uri="amqp://process:secret@broker.example:5672/",
        requests_queues=(),
        activity_exchange=names.activity_exchange,
        control_exchange=names.control_exchange,
        config={"behaviour": str(Behaviour.RUN)},
        placement=Placement.POOLED,
    )
    return WorkerSpec(environment=environment, generation=Generation(term, 1), slot=slot)
