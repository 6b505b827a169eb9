"""The assignments of a process: the workers assigned to it, and the worker ids that it refuses. Pure.

Each worker id is used only once. The leader repeats its questions, and RabbitMQ may deliver them late and twice: an
`assign` that arrives after the worker was released, forgotten or refused never starts it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from osrdyne.protocol.control import Generation
from osrdyne.protocol.names import WorkerId
from osrdyne.protocol.pooled import (
    MAX_LOG_LINES,
    Assign,
    Assignment,
    AssignmentExit,
    AssignmentState,
    Forget,
    Refusal,
    Release,
)

MAX_USED = 10_000
"""The number of worker ids that are remembered after the worker's end. The leader stops repeating a question long
before this many further workers have ended."""


class Assignments:
    """The facts that this process reports about its workers. Starts and stops no worker: callers act on the results."""

    def __init__(self) -> None:
        self._assigned: dict[WorkerId, Assignment] = {}
        self._refused: dict[WorkerId, Refusal] = {}
        self._used: OrderedDict[WorkerId, None] = OrderedDict()

    @property
    def active(self) -> list[WorkerId]:
        """The workers that have not exited."""
        return [worker_id for worker_id, one in self._assigned.items() if one.state is not AssignmentState.EXITED]

    @property
    def refused(self) -> tuple[Refusal, ...]:
        return tuple(self._refused.values())

    def report(self, update: Callable[[Assignment], Assignment]) -> tuple[Assignment, ...]:
        """All assignments. `update` adds the figures of workers that have not exited."""
        return tuple(one if one.state is AssignmentState.EXITED else update(one) for one in self._assigned.values())

    def assign(self, question: Assign, generation: Generation, *, now: float, closed: str | None = None) -> bool:
        """Record the worker; returns whether the caller must start it. `closed`: why the process accepts no more
        workers."""
        environment = question.environment
        worker_id = environment.worker_id
        # A copy of the message, or one that arrives after the release (lifecycle: pooled-ids-once).
        if worker_id in self._assigned or worker_id in self._used:
            return False
        # A second safeguard: the leader assigns a slot only once (lifecycle: pooled-one-slot).
        taken_by = self._holder_of(question)
        if closed is not None or taken_by is not None:
            reason = closed or "a worker of this key and slot runs here"
            self.refuse(worker_id, reason, taken_by=taken_by)
            return False
        self._assigned[worker_id] = Assignment(
            worker_id=worker_id,
            key=environment.key,
            slot=question.slot,
            spec_hash=question.spec_hash,
            started_at=question.started_at,
            generation=generation,
            last_used=now,
        )
        return True

    def refuse(self, worker_id: WorkerId, reason: str, *, taken_by: WorkerId | None = None) -> None:
        """Never start this worker. A worker that is already assigned is not changed."""
        if worker_id not in self._assigned and worker_id not in self._used:
            self._use(worker_id)
            self._refused[worker_id] = Refusal(worker_id, taken_by, reason)

    def release(self, question: Release) -> bool:
        """Returns whether the caller must stop the worker. An unknown worker is refused if it is assigned later."""
        assigned = self._assigned.get(question.worker_id)
        if assigned is None:
            self._use(question.worker_id)
            return False
        if assigned.state is AssignmentState.EXITED:
            return False
        self._assigned[question.worker_id] = replace(assigned, state=AssignmentState.STOPPING)
        return True

    def forget(self, question: Forget) -> None:
        """Remove an exited worker or a refusal. A worker that has not exited stays."""
        assigned = self._assigned.get(question.worker_id)
        if assigned is not None and assigned.state is not AssignmentState.EXITED:
            # A worker that runs is never forgotten: the leader would start a second one (lifecycle:
            # pooled-forget-after-exit).
            return
        self._assigned.pop(question.worker_id, None)
        self._refused.pop(question.worker_id, None)
        self._use(question.worker_id)

    def exited(self, worker_id: WorkerId, how: AssignmentExit, log_lines: tuple[str, ...] = ()) -> None:
        """Record the end of a worker."""
        assigned = self._assigned[worker_id]
        lines = log_lines[-MAX_LOG_LINES:]
        self._assigned[worker_id] = replace(assigned, state=AssignmentState.EXITED, exit=how, log_lines=lines)

    def _holder_of(self, question: Assign) -> WorkerId | None:
        place = (question.environment.key, question.slot)
        return next((one for one in self.active if (self._assigned[one].key, self._assigned[one].slot) == place), None)

    def _use(self, worker_id: WorkerId) -> None:
        self._used[worker_id] = None
        self._used.move_to_end(worker_id)
        if len(self._used) > MAX_USED:
            oldest, _ = self._used.popitem(last=False)
            self._refused.pop(oldest, None)
