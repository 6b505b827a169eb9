"""A simulated pooled process: it executes the questions of `protocol.pooled` without running workers.

The configuration of its workers selects their behaviour (`conformance_worker.Behaviour`). It imports only the protocol,
because it also runs in the image of the conformance suite (`pooled_process`), which has few packages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from osrdyne.aio.clock import Clock
from osrdyne.protocol.control import Generation
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.names import WorkerId
from osrdyne.protocol.pooled import (
    STATE_INTERVAL,
    Assign,
    Assignment,
    AssignmentExit,
    AssignmentState,
    Drain,
    Forget,
    MemoryLimit,
    ProcessMemory,
    ProcessState,
    Question,
    Refusal,
    Release,
)
from osrdyne.testing.conformance_worker import Behaviour, describe

JOB = 0.5
"""Seconds that the job of a busy worker takes."""
CUT_OFF = 128 + 9


class PlayedProcess:
    """One simulated process. `report`: called with each of its states."""

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
        """Whether it neither reads questions nor reports."""
        self.assigned: list[WorkerId] = []
        """The workers that it has started, in their order."""
        self.state = ProcessState(sequence=0, ready=ready, started_at=clock.time())
        self._clock = clock
        self._send = report
        self._interval = interval
        self._behaviours: dict[WorkerId, Behaviour] = {}
        self._seen: set[WorkerId] = set()

    def begin(self) -> None:
        """Report now and at intervals."""
        if self.alive:
            self.report()
            self._clock.call_later(self._interval, self.begin)

    def report(self, *answers: str) -> None:
        """Report the state, with the answers to these questions."""
        self.state = replace(self.state, sequence=self.state.sequence + 1, answers=answers)
        if self.alive and not self.mute:
            self._send(self.state)

    def set(self, **changes: object) -> None:
        """Change the state, and report it."""
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]
        self.report()

    def use(self, worker_id: WorkerId, *, in_flight: int, last_used: float | None = None) -> None:
        """Set the number of running requests of a worker."""
        used = self._clock.time() if last_used is None else last_used
        self._change(worker_id, in_flight=in_flight, last_used=used)
        self.report()

    def set_heap(self, share: float) -> None:
        self.set(memory=ProcessMemory(heap_used=int(share * 1000), heap_max=1000, rss=2000, pss=1500))

    def set_memory_limit(self, share: float, *, scope: str = "host played", total: int = 1000) -> None:
        """Set the used share of the memory of its host or cgroup."""
        self.set(memory=replace(self.state.memory, limit=MemoryLimit(int(share * total), total, scope)))

    def set_live_heap(self, share: float) -> None:
        """Set the share of the heap that is used after a collection."""
        self.set(memory=replace(self.state.memory, heap_max=1000, heap_live=int(share * 1000)))

    def end_worker(self, worker_id: WorkerId, code: int = CUT_OFF, reason: str | None = None) -> None:
        """Let a worker end by itself."""
        self._end(worker_id, code, reason)
        self.report()

    def take(self, question: Question, generation: Generation) -> None:
        """Execute a question of the leader, unless a later leader has sent one before."""
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
        self.report(question.question)

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
    """The first lines of a worker of the conformance suite."""
    lines = [json.dumps({**describe(environment), "arguments": []})]
    lines += [f"line {number}" for number in range(int(str(environment.config.get("lines", 0))))]
    silent = environment.config.get("behaviour") == Behaviour.SILENT
    return tuple(lines if silent else [*lines, "ready"])
