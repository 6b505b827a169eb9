"""The leader's record of one process: its instance, its latest report, and the questions that it has not answered.

No I/O. `PooledDriver` writes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from osrdyne.aio.signals import Wakeup
from osrdyne.drivers.base import Exit, Instance, InstanceId, InstanceState
from osrdyne.protocol.names import Key, WorkerId
from osrdyne.protocol.pooled import Assignment, AssignmentState, MemoryLimit, ProcessState, Refusal

SETTLE = 60.0
"""Seconds after the last change of the workers of a process from which its live heap is compared."""
ID_PREFIX = "pooled:"
"""The prefix of the instance ids of assigned workers; it distinguishes them from ids of the inner driver."""

_STATES = {
    AssignmentState.RUNNING: InstanceState.RUNNING,
    AssignmentState.STOPPING: InstanceState.STOPPING,
    AssignmentState.EXITED: InstanceState.EXITED,
}


@dataclass(frozen=True, slots=True)
class Starting:
    """A worker whose `assign` was sent in `term`, and which the process has not reported yet."""

    key: Key
    slot: int
    spec_hash: str
    started_at: float
    term: int


@dataclass(slots=True)
class HeapHistory:
    """The live heap of a process since its workers last changed. `first`, `last`: bytes after a garbage collection;
    `first` is the lowest value so far."""

    first: int | None = None
    last: int | None = None
    _workers: frozenset[WorkerId] = frozenset()
    _since: float = 0.0
    _before: int | None = None

    def note(self, state: ProcessState, *, now: float) -> None:
        """Add the value of a report. Values that were measured before the last change of the workers are ignored."""
        living = (one.worker_id for one in state.assignments if one.state is not AssignmentState.EXITED)
        workers, live = frozenset(living), state.memory.heap_live
        if workers != self._workers:
            self._workers, self._since, self._before, self.first, self.last = workers, now, live, None, None
        # A new worker loads its data, so that the heap grows without a leak.
        if live is None or live == self._before or now - self._since < SETTLE:
            return
        self._before = None
        self.first = live if self.first is None else min(self.first, live)
        self.last = live

    @property
    def grown(self) -> int:
        """Bytes by which the live heap has grown."""
        return 0 if self.first is None or self.last is None else self.last - self.first


@dataclass(slots=True, eq=False)
class Process:
    """One process.

    `instance`: from the latest listing of the inner driver. `seen_at`, `heard_at`: monotonic times of the first listing
    and of the latest report. `started_in`: the term in which this driver started it; None if it was found. `reserved`:
    workers that have a place and are not assigned yet. `stopping`: workers that were released. `removed`: workers of an
    ended process that the pool has removed. `questions`, `watchers`: the events of callers that wait for an answer, or
    for any report. `closing`: the driver is ending it and assigns no more workers to it. `retiring`: why its workers
    must be replaced. `alone`: the only key that it accepts. `empty_since`: monotonic. `is_outdated`: it was started
    with other settings than any that the pool has now. `given_hash`: the hash of the settings with which this driver
    started it; None if it was found. `short_of_memory`: the host or cgroup is short of memory. `shared`: workers that
    were in it together with workers of other keys.
    """

    instance: Instance
    seen_at: float
    heard_at: float
    started_in: int | None = None
    is_outdated: bool = False
    given_hash: str | None = None
    state: ProcessState | None = None
    starting: dict[WorkerId, Starting] = field(default_factory=dict)
    reserved: set[WorkerId] = field(default_factory=set)
    stopping: set[WorkerId] = field(default_factory=set)
    removed: set[WorkerId] = field(default_factory=set)
    questions: dict[str, Wakeup] = field(default_factory=dict)
    watchers: set[Wakeup] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    closing: bool = False
    retiring: str | None = None
    alone: Key | None = None
    empty_since: float | None = None
    log_lines: tuple[str, ...] = ()
    short_of_memory: bool = False
    shared: set[WorkerId] = field(default_factory=set)
    heap: HeapHistory = field(default_factory=lambda: HeapHistory())

    @property
    def worker_id(self) -> WorkerId:
        return self.instance.worker_id

    @property
    def settings_hash(self) -> str:
        """The hash of its settings: workers of other settings have no place in it."""
        return self.given_hash or self.instance.spec_hash

    @property
    def is_gone(self) -> bool:
        return self.instance.state is InstanceState.EXITED

    @property
    def is_ready(self) -> bool:
        return self.state is not None and self.state.ready and not self.is_gone

    def is_known(self, term: int) -> bool:
        """Whether its workers are known. Before that, an earlier leader may still assign workers to it.

        A process that this term has started holds only workers that this term assigned to it.
        """
        # `>=` and not `==`: an answer to a later leader also shows that earlier messages are refused.
        return self.is_gone or self.started_in == term or (self.state is not None and self.state.term >= term)

    @property
    def takes_workers(self) -> bool:
        """Whether workers may be assigned to it, now or once it is ready."""
        running = self.instance.state is InstanceState.RUNNING
        draining = self.state is not None and self.state.draining
        return running and not (draining or self.closing or self.retiring or self.is_outdated)

    @property
    def load(self) -> int:
        """The number of occupied places: by workers that have not exited, and by workers that are still to be
        assigned."""
        living = {worker.worker_id for worker in self.assignments() if worker.state is not AssignmentState.EXITED}
        # A union and not a sum: a worker moves from one set to the next, and may be in two for a moment.
        return len(living | self.starting.keys() | self.reserved)

    @property
    def heap_share(self) -> float:
        """The used share of the heap of its JVM; 0 while it is unknown."""
        memory = None if self.state is None else self.state.memory
        if memory is None or memory.heap_used is None or not memory.heap_max:
            return 0.0
        return memory.heap_used / memory.heap_max

    @property
    def memory_limit(self) -> MemoryLimit | None:
        """The memory of its host or cgroup; None while it is unknown."""
        return None if self.state is None else self.state.memory.limit

    def assignments(self) -> list[Assignment]:
        """The workers that it has reported, without those that the pool has removed since the process ended."""
        reported = () if self.state is None else self.state.assignments
        return [worker for worker in reported if worker.worker_id not in self.removed]

    def assignment(self, worker_id: WorkerId) -> Assignment | None:
        return next((worker for worker in self.assignments() if worker.worker_id == worker_id), None)

    def refusal(self, worker_id: WorkerId) -> Refusal | None:
        refused = () if self.state is None else self.state.refused
        return next((one for one in refused if one.worker_id == worker_id), None)

    def runs(self, worker_id: WorkerId) -> bool:
        """Whether the worker may run: the process reports it and not its exit, or the `assign` may still arrive."""
        if self.is_gone:
            return False
        reported = self.assignment(worker_id)
        # Neither reported nor starting: it was forgotten or refused, and no worker starts with its id any more.
        return worker_id in self.starting if reported is None else reported.state is not AssignmentState.EXITED

    def apply(self, state: ProcessState, *, term: int, now: float) -> bool:
        """Apply a report. Returns False if it is older than the latest one; its answers count anyway, because the later
        report contains their effects."""
        is_news = self.state is None or state.is_newer_than(self.state)
        if is_news:
            self.state, self.heard_at = state, now
            self.heap.note(state, now=now)
            living = [worker for worker in state.assignments if worker.state is not AssignmentState.EXITED]
            if len({worker.key for worker in living}) > 1:
                # Permanently: what another key has left in the process may end it later.
                self.shared.update(worker.worker_id for worker in living)
            for worker in state.assignments:
                # From now on its state comes from the reports.
                self.starting.pop(worker.worker_id, None)
            # A process that has accepted a message of this term ignores messages of earlier terms that are still in
            # transit: a worker that an earlier term assigned and the report does not list will never start.
            if state.term >= term:
                self.starting = {name: one for name, one in self.starting.items() if one.term >= term}
            for watcher in self.watchers:
                watcher.set()
        for question in state.answers:
            if (waiting := self.questions.get(question)) is not None:
                self.answered.add(question)
                waiting.set()
        return is_news

    def wake(self) -> None:
        """Wake all callers that wait for the process, because it or the term has ended."""
        for waiting in [*self.questions.values(), *self.watchers]:
            waiting.set()

    # --- its workers as instances for the pool

    def workers(self) -> list[Instance]:
        """The workers in it as instances, those of unanswered `assign` messages included."""
        reported = [self._reported(worker) for worker in self.assignments()]
        return [*reported, *(self._unreported(name, one) for name, one in self.starting.items())]

    def worker(self, worker_id: WorkerId) -> Instance | None:
        return next((worker for worker in self.workers() if worker.worker_id == worker_id), None)

    def _reported(self, worker: Assignment) -> Instance:
        state, end = _STATES[worker.state], None
        if worker.state is AssignmentState.EXITED:
            end = Exit() if worker.exit is None else Exit(code=worker.exit.code, reason=worker.exit.reason)
        elif self.is_gone:
            # A worker without an end of its own has ended with its process.
            state, end = InstanceState.EXITED, self._end()
        elif worker.worker_id in self.stopping:
            state = InstanceState.STOPPING
        return Instance(
            instance_id=self.instance_id(worker.worker_id),
            key=worker.key,
            slot=worker.slot,
            worker_id=worker.worker_id,
            state=state,
            spec_hash=worker.spec_hash,
            started_at=worker.started_at,
            external_id=self.instance.external_id,
            exit=end if end is None else replace(end, shared=worker.worker_id in self.shared),
            retiring=self.retiring is not None,
        )

    def _unreported(self, worker_id: WorkerId, one: Starting) -> Instance:
        stopping = worker_id in self.stopping
        state = InstanceState.STOPPING if stopping else InstanceState.RUNNING
        return Instance(
            instance_id=self.instance_id(worker_id),
            key=one.key,
            slot=one.slot,
            worker_id=worker_id,
            state=InstanceState.EXITED if self.is_gone else state,
            spec_hash=one.spec_hash,
            started_at=one.started_at,
            external_id=self.instance.external_id,
            exit=self._end() if self.is_gone else None,
            retiring=self.retiring is not None,
        )

    def _end(self) -> Exit:
        end = self.instance.exit or Exit()
        reason = "the process ended" if end.reason is None else f"the process ended: {end.reason}"
        return Exit(code=end.code, signal=end.signal, reason=reason, of_process=True)

    def instance_id(self, worker_id: WorkerId) -> InstanceId:
        return InstanceId(f"{ID_PREFIX}{self.worker_id}:{worker_id}")


def split_id(instance_id: InstanceId) -> tuple[WorkerId, WorkerId] | None:
    """The process and the worker of an instance id; None if it is not the id of an assigned worker."""
    if not instance_id.startswith(ID_PREFIX):
        return None
    process, _, worker = instance_id.removeprefix(ID_PREFIX).partition(":")
    return WorkerId(process), WorkerId(worker)
