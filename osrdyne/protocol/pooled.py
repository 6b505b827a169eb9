"""The messages between the leader and a pooled worker process. Source: docs/reference/protocol/pooled.md.

A process hosts the workers of many keys; one worker in it is an *assignment*. The leader sends questions, which are
control messages to the process; the process answers each one with a report of its state. Both may be lost, duplicated
and reordered: the leader repeats a question with the same id, and a process acts only once on each worker id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from osrdyne.errors import ConfigurationError, InvalidMessageError
from osrdyne.protocol.activity import ActivityReport, Event
from osrdyne.protocol.control import Command, ControlMessage, Generation
from osrdyne.protocol.environment import URI_FILE_VARIABLE, WorkerEnvironment
from osrdyne.protocol.names import Key, WorkerId

PROCESS_KEY = Key("pooled")
"""The key of the group of processes, and the routing key of their reports. A pool may have a key of the same name: the
event and the worker id distinguish them."""
STATE_INTERVAL = 5.0
"""Seconds between two reports of a process whose state does not change."""
MAX_LOG_LINES = 20
HOST_SCOPE = "host "
"""The prefix of the scope of a host's memory; the scope of a cgroup has another one."""

_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0)]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Assign:
    """Start the worker of `environment`, unless the process has or had its worker id.

    The leader chooses `slot`, `spec_hash` and `started_at` (seconds since the epoch), and every report repeats them.
    """

    question: str
    environment: WorkerEnvironment
    slot: int
    spec_hash: str
    started_at: float


@dataclass(frozen=True, slots=True)
class Release:
    """End the worker within `grace` seconds. If the process has not had the worker id yet, it refuses the id from then
    on."""

    question: str
    worker_id: WorkerId
    grace: float


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove an exited worker, or a refusal, from the reports. The process refuses the worker id from then on."""

    question: str
    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class ReportState:
    """Report the state and change nothing."""

    question: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Accept no more assignments, and exit after the last one has ended."""

    question: str


Question = Assign | Release | Forget | ReportState | Drain


class AssignmentState(StrEnum):
    RUNNING = "running"
    STOPPING = "stopping"
    EXITED = "exited"


@dataclass(frozen=True, slots=True)
class AssignmentExit:
    """How an assignment ended: the exit code of the worker, and the reason in one sentence."""

    code: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """One worker in a process. `generation` is that of the `assign` message; `in_flight` counts its requests;
    `last_used` is the time of its last request or, before the first one, of its assignment (seconds since the
    epoch)."""

    worker_id: WorkerId
    key: Key
    slot: _Count
    spec_hash: str
    started_at: _Seconds
    generation: Generation
    state: AssignmentState = AssignmentState.RUNNING
    exit: AssignmentExit | None = None
    log_lines: tuple[str, ...] = ()
    in_flight: _Count = 0
    last_used: _Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """A worker that the process did not start, and why. `taken_by`: the worker that holds its key and slot."""

    worker_id: WorkerId
    taken_by: WorkerId | None
    reason: str


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The memory of the host or of a cgroup, in bytes: `used` cannot be reclaimed without swapping. Processes with the
    same `scope` share it."""

    used: _Count
    total: Annotated[int, Field(gt=0)]
    scope: Annotated[str, Field(max_length=500)]

    @property
    def share(self) -> float:
        return self.used / self.total


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes; None: unknown. `heap_used`, `heap_max` and `heap_live` (after the last collection) are of the JVM, `rss`
    and `pss` of the process with its JVM. `limit`: the tightest one of host and cgroups."""

    heap_used: _Count | None = None
    heap_max: _Count | None = None
    rss: _Count | None = None
    pss: _Count | None = None
    heap_live: _Count | None = None
    limit: MemoryLimit | None = None


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The complete state of a process at one moment.

    `sequence` grows by one with each report. `term` is the highest term of a message that the process has accepted;
    `answers` are the ids of the questions that this report answers, with their effects. `requests` counts the requests
    served since the start, `started_at` is in seconds since the epoch. `cold_start`: milliseconds of the finished parts
    of the start (`PROCESS_START_PARTS`). `executor_seconds`: the time of tasks of all workers, in seconds on one core.
    """

    sequence: _Count
    term: _Count = 0
    answers: tuple[str, ...] = ()
    ready: bool = False
    draining: bool = False
    assignments: tuple[Assignment, ...] = ()
    refused: tuple[Refusal, ...] = ()
    memory: ProcessMemory = field(default_factory=ProcessMemory)
    requests: _Count = 0
    started_at: _Seconds = 0.0
    cold_start: Mapping[str, _Count] = field(default_factory=dict)
    executor_seconds: _Seconds | None = None

    def is_newer_than(self, other: ProcessState) -> bool:
        """Whether the process has sent this report after `other`; a restarted process counts from zero again."""
        return (self.started_at, self.sequence) > (other.started_at, other.sequence)

    def to_report(self, process: WorkerId) -> ActivityReport:
        details: dict[str, object] = _STATE.dump_python(self, mode="json")
        return ActivityReport(PROCESS_KEY, Event.PROCESS_STATE, process, details)


@dataclass(frozen=True, slots=True)
class _AssignedWorker:
    """The field `worker` of `assign`. `variables` hold the AMQP URI."""

    worker_id: WorkerId
    key: Key
    slot: _Count
    spec_hash: str
    started_at: _Seconds
    variables: dict[str, str] = field(repr=False)


_Id = Annotated[str, Field(min_length=1, max_length=255)]
_STATE = TypeAdapter(ProcessState)
_WORKER = TypeAdapter(_AssignedWorker)
_QUESTION = TypeAdapter[str](_Id)
_WORKER_ID = TypeAdapter[str](_Id)
_GRACE = TypeAdapter[float](_Seconds)


def process_state_of(report: ActivityReport) -> ProcessState:
    """Parse the state in a report of the event `process-state`. Raises `InvalidMessageError` that names the field."""
    return _read(_STATE, report.details, at="process-state")


def question_to_control(question: Question, generation: Generation) -> ControlMessage:
    """The control message for the routing key of the process. For `Assign` it contains the AMQP URI."""
    match question:
        case Assign(environment=environment):
            worker = _AssignedWorker(
                worker_id=environment.worker_id,
                key=environment.key,
                slot=question.slot,
                spec_hash=question.spec_hash,
                started_at=question.started_at,
                variables=environment.to_variables(),
            )
            details: dict[str, object] = {"worker": _WORKER.dump_python(worker, mode="json")}
        case Release():
            details = {"worker_id": question.worker_id, "grace": question.grace}
        case Forget():
            details = {"worker_id": question.worker_id}
        case ReportState() | Drain():
            details = {}
    return ControlMessage(_COMMANDS[type(question)], generation, {"id": question.question, **details})


def question_of_control(message: ControlMessage) -> Question | None:
    """Parse a question; None if the message has another command. `drain` has no id if the leader does not wait for an
    answer.

    Raises `InvalidMessageError` that names the field, and never a value: `assign` contains a password.
    """
    details, command = message.details, message.command
    if command not in _COMMANDS.values():
        return None
    if command is Command.DRAIN and "id" not in details:
        return Drain("")
    question = _read(_QUESTION, details.get("id"), at=f"{command}.id")
    match command:
        case Command.ASSIGN:
            return _assign(question, details.get("worker"))
        case Command.RELEASE:
            grace = _read(_GRACE, details.get("grace"), at="release.grace")
            return Release(question, _worker_id(details, command), grace)
        case Command.FORGET:
            return Forget(question, _worker_id(details, command))
        case Command.DRAIN:
            return Drain(question)
        case _:
            return ReportState(question)


_COMMANDS: Mapping[type, Command] = {
    Assign: Command.ASSIGN,
    Release: Command.RELEASE,
    Forget: Command.FORGET,
    ReportState: Command.STATE,
    Drain: Command.DRAIN,
}


def _worker_id(details: Mapping[str, object], command: Command) -> WorkerId:
    return WorkerId(_read(_WORKER_ID, details.get("worker_id"), at=f"{command}.worker_id"))


def _assign(question: str, value: object) -> Assign:
    worker = _read(_WORKER, value, at="assign.worker")
    if URI_FILE_VARIABLE in worker.variables:
        raise InvalidMessageError(f"assign.worker.variables: {URI_FILE_VARIABLE} names a file of another host.")
    try:
        environment = WorkerEnvironment.from_variables(worker.variables)
    except ConfigurationError as error:
        raise InvalidMessageError(f"assign.worker.variables: {error.message}") from None
    if (environment.worker_id, environment.key) != (worker.worker_id, worker.key):
        raise InvalidMessageError("assign.worker: worker_id and key differ from those of the variables.")
    return Assign(question, environment, worker.slot, worker.spec_hash, worker.started_at)


def _read(adapter: TypeAdapter[_T], value: Any, *, at: str) -> _T:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join([at, *map(str, first["loc"])])
        raise InvalidMessageError(f"{place}: {first['msg']}.") from None  # the error holds the values
