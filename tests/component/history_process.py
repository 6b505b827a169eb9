"""A process of pooled workers as the leader and the broker see it: it takes questions, has workers, and has its faults.

Made by `history_world` for each process that the driver starts; its workers are those of `history_worker`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum

from osrdyne.aio.clock import Clock
from osrdyne.amqp import Message
from osrdyne.drivers.base import Exit, Instance, InstanceId, InstanceState, WorkerSpec
from osrdyne.protocol.control import Generation, control_from_wire
from osrdyne.protocol.names import PoolNames, WorkerId
from osrdyne.protocol.pooled import Assign, ProcessState, question_of_control
from osrdyne.testing.conformance_worker import Behaviour
from osrdyne.testing.drivers import FakeWorker
from osrdyne.testing.fakes.broker import FakeBroker, Holder, Stored
from osrdyne.testing.played_process import PlayedProcess

SESSION_TIME = 1.0
"""Seconds until its Spark session is up."""
LATE = 4.0


class Passage(StrEnum):
    """How a message travels."""

    LOST = "lost"
    DOUBLED = "doubled"
    LATE = "late"
    """Later than those that are sent after it."""

    def carry(self, deliver: Callable[[], object], clock: Clock) -> None:
        match self:
            case Passage.LOST:
                return
            case Passage.DOUBLED:
                deliver()
                clock.call_later(LATE, deliver)
            case Passage.LATE:
                clock.call_later(LATE, deliver)


class SimulatedProcess(PlayedProcess):
    """One process, from its start to its end."""

    def __init__(
        self,
        fake: FakeWorker,
        *,
        names: PoolNames,
        broker: FakeBroker,
        clock: Clock,
        begin_worker: Callable[[FakeWorker, SimulatedProcess], None],
    ) -> None:
        super().__init__(fake.spec.worker_id, clock, self._send, ready=False)
        self.fake = fake
        self.reports_arrive: Callable[[], bool] = lambda: True
        self.questions: deque[Passage] = deque()
        """Of the next questions that it gets; the others arrive at once."""
        self.states: deque[Passage] = deque()
        """The same for its reports."""
        self._names = names
        self._broker = broker
        self._begin_worker = begin_worker
        self._workers: dict[WorkerId, FakeWorker] = {}

    async def live(self) -> None:
        """Until it ends, with all its workers."""
        names = self._names
        queue = self._broker.declare_queue(names.control_queue(self.worker_id), {})
        self._broker.bind(queue.name, names.control_exchange, names.control_worker_routing_key(self.worker_id))
        queue.holders.append(Holder(deliver=self._read, on_delete=lambda: None))
        self.begin()
        self._clock.call_later(SESSION_TIME, lambda: self.set(ready=True))
        try:
            await self.fake.gone.wait()
        finally:
            self.alive = False
            self._broker.delete_queue(queue.name)
        end = self.fake.instance.exit
        # Who is killed because it hangs has ended by itself: its workers were not stopped while they worked.
        by_itself = self.mute or (end is not None and end.code == 1)
        for worker in self._workers.values():
            _end(worker, 1 if by_itself else 0)

    def exit_instance(self, instance_id: InstanceId, code: int) -> None:
        """One of its workers ends by itself."""
        self.end_worker(WorkerId(instance_id), code)

    # --- messages

    def _read(self, stored: Stored) -> None:
        message = control_from_wire(stored.message.body)
        question = None if message is None else question_of_control(message)
        if message is None or question is None:
            return
        generation = message.generation
        if self.questions:
            self.questions.popleft().carry(lambda: self.take(question, generation), self._clock)
        else:
            self.take(question, generation)

    def _send(self, state: ProcessState) -> None:
        if not self.reports_arrive():
            return
        if self.states:
            self.states.popleft().carry(lambda: self._publish(state), self._clock)
        else:
            self._publish(state)

    def _publish(self, state: ProcessState) -> None:
        queue = self._broker.queues.get(self._names.activity_queue)
        if queue is not None:
            report = state.to_report(self.worker_id)
            message = Message(body=report.wire_body(), headers=report.wire_headers())
            queue.put(message, exchange=self._names.activity_exchange, routing_key=report.key)

    # --- workers

    def _assign(self, question: Assign, generation: Generation) -> None:
        known = len(self.assigned)
        super()._assign(question, generation)
        if len(self.assigned) == known:
            return
        environment = question.environment
        instance = Instance(
            instance_id=InstanceId(environment.worker_id),
            key=environment.key,
            slot=question.slot,
            worker_id=environment.worker_id,
            state=InstanceState.RUNNING,
            spec_hash=question.spec_hash,
            started_at=question.started_at,
            external_id=self.fake.instance.external_id,
        )
        spec = WorkerSpec(environment=environment, generation=generation, slot=question.slot)
        worker = self._workers[environment.worker_id] = FakeWorker(instance, spec)
        self._begin_worker(worker, self)
        if worker.stubborn:
            self._behaviours[environment.worker_id] = Behaviour.STUBBORN

    def _end(self, worker_id: WorkerId, code: int, reason: str | None) -> None:
        super()._end(worker_id, code, reason)
        _end(self._workers[worker_id], code)


def _end(worker: FakeWorker, code: int) -> None:
    if not worker.gone.is_set():
        worker.instance = replace(worker.instance, state=InstanceState.EXITED, exit=Exit(code=code))
        worker.gone.set()
