"""Simulated links to pooled processes, which lose, duplicate and reorder messages, and the simulated processes.

For tests of the leader. `PlayedNetwork` replaces RabbitMQ; each process is a `PlayedProcess`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from osrdyne.aio.clock import Clock
from osrdyne.drivers.base import WorkerSpec, new_worker_id
from osrdyne.drivers.pooled.driver import PooledDriver
from osrdyne.drivers.pooled.placement import ProcessSettings
from osrdyne.errors import LeadershipLostError
from osrdyne.protocol.activity import ActivityReport, report_from_wire
from osrdyne.protocol.control import Generation, control_from_wire
from osrdyne.protocol.environment import Placement, WorkerEnvironment
from osrdyne.protocol.names import PoolNames, WorkerId
from osrdyne.protocol.pooled import (
    PROCESS_KEY,
    STATE_INTERVAL,
    ProcessState,
    Question,
    process_state_of,
    question_of_control,
    question_to_control,
)
from osrdyne.testing.conformance_worker import Behaviour
from osrdyne.testing.played_process import PlayedProcess


@dataclass(slots=True)
class Faults:
    """The faults of the network. `lost`, `doubled`: shares of the messages. `delay`: the longest transit in seconds.
    `report_interval`: the seconds between two reports of a process."""

    lost: float = 0.0
    doubled: float = 0.0
    delay: float = 0.0
    report_interval: float = STATE_INTERVAL


class PlayedNetwork:
    """Delivers questions to the processes and reports to the drivers, with the real encoding of both."""

    def __init__(self, clock: Clock, faults: Faults | None = None, *, seed: int = 0) -> None:
        self.clock = clock
        self.faults = faults or Faults()
        self.processes: dict[WorkerId, PlayedProcess] = {}
        self.drivers: list[PooledDriver] = []
        self.lose: Callable[[Question], bool] = lambda question: False
        """Selects questions that get lost, besides random ones."""
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
    """A `ProcessLink` over a simulated network."""

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
        self.suspects: set[WorkerId] = set()
        """The workers that have reported to run a suspect."""
        self.loading: set[WorkerId] = set()
        """The workers that have reported that they load their data."""
        self._ask = ask
        self._pool = pool

    async def send(self, process: WorkerId, question: Question) -> bool:
        if self.accepts:
            self._ask(process, question, Generation(self.term, 1))
        return self.accepts

    async def confirm(self, *, since: float | None = None) -> None:
        """Raise for a deposed leader (`leads` is False), unless an answer from before counts (`since` is None)."""
        self.confirmed.append(since)
        if not self.leads and since is not None:
            raise LeadershipLostError("Another leader has the token.")

    async def make_process(self, slot: int, settings: ProcessSettings) -> WorkerSpec:
        return replace(process_spec(slot, pool=self._pool, term=self.term), spec_hash=settings.hash)

    def release_process(self, process: WorkerId) -> None:
        self.released.append(process)

    def runs_suspect(self, worker_id: WorkerId) -> bool:
        return worker_id in self.suspects

    def loads(self, worker_id: WorkerId) -> bool:
        return worker_id in self.loading

    def note_assigned(self, seconds: float) -> None:
        self.assigned.append(seconds)


def process_spec(slot: int, *, pool: str = "pool", term: int = 3) -> WorkerSpec:
    """The specification of a process as from the pool."""
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
