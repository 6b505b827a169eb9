"""A pooled worker process: the leader assigns keys to it, and it runs a worker for each. `main` runs it once.

The process has its own connection, over which it receives the leader's questions and reports its state. It handles no
requests: its workers do, each over its own connection. If the process is killed, RabbitMQ requeues the requests of all
its workers. Source: docs/reference/protocol/pooled.md.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

from osrdyne.aio.clock import Clock
from osrdyne.aio.tasks import at_most, endless, first_of
from osrdyne.amqp import Connection, ConnectionOptions, connect
from osrdyne.errors import BrokerError, BrokerUnavailableError, InvalidMessageError
from osrdyne.logs import get_logger
from osrdyne.protocol.activity import BUSY_INTERVAL, COLD_START_FIELD, Event
from osrdyne.protocol.control import Command, ControlMessage, is_plausible_term
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.names import PoolNames, WorkerId
from osrdyne.protocol.pooled import (
    STATE_INTERVAL,
    Assign,
    Assignment,
    AssignmentExit,
    Drain,
    Forget,
    ProcessMemory,
    ProcessState,
    Release,
    ReportState,
    question_of_control,
)
from osrdyne_worker.app.errors import describe_with_place
from osrdyne_worker.pooled.assignments import Assignments
from osrdyne_worker.pooled.log_lines import LogLines
from osrdyne_worker.runtime.connection import loss_of, stay_connected
from osrdyne_worker.runtime.control import FORGED_INTERVAL, ControlWarnings, is_plausible, listen
from osrdyne_worker.runtime.exit import ExitCode, ExitReason, StartFailed, Stop, Unrecoverable
from osrdyne_worker.runtime.loop_watchdog import Blocked, LoopWatchdog
from osrdyne_worker.runtime.ready_file import ReadyFile
from osrdyne_worker.runtime.reports import Reporter
from osrdyne_worker.runtime.session_health import SessionHealth
from osrdyne_worker.runtime.settings import RuntimeSettings
from osrdyne_worker.runtime.start_times import StartTimes, process_age

CLOSING_TIME = 5.0
"""Seconds of `stop_grace` that the process needs for itself, after its workers."""
CUT_OFF_DELAY = 0.5
"""Seconds between the end of a worker's grace period and its cut-off: the worker uses the whole grace period for its
requests and last reports."""
MAX_LEFT_BEHIND = 8
"""The number of threads of ended workers that may still run. A process with more accepts no further assignments."""
LEFT_BEHIND_AFTER = 30.0
"""Seconds after the end of a worker from which its threads count: before, they may still close its session."""

log = get_logger("pooled")


class HostedWorker(Protocol):
    """A worker as the process sees it; see `AssignedWorker`."""

    @property
    def in_flight(self) -> int: ...
    @property
    def last_used(self) -> float: ...
    @property
    def requests(self) -> int: ...
    @property
    def left_behind(self) -> int: ...
    async def run(self) -> AssignmentExit: ...
    def request_exit(self, reason: ExitReason) -> None: ...
    def report_blocked(self, blocked: Blocked) -> None: ...
    async def cut_off(self, reason: str) -> None: ...


class Host(Protocol):
    """Creates the workers; see `WorkerHost`."""

    async def start(self) -> None: ...
    def start_times(self) -> Mapping[str, float]: ...
    def make_worker(self, environment: WorkerEnvironment) -> HostedWorker: ...
    async def loss(self) -> str | None: ...
    async def memory(self) -> ProcessMemory: ...
    async def executor_seconds(self) -> float | None: ...
    async def close(self) -> None: ...


class PooledProcess:
    """One process. `handle` takes the leader's questions; `run` does everything else."""

    def __init__(
        self,
        environment: WorkerEnvironment,
        *,
        host: Host,
        settings: RuntimeSettings,
        reporter: Reporter,
        ready_file: ReadyFile,
        log_lines: LogLines,
        start_times: StartTimes,
        clock: Clock,
    ) -> None:
        self._environment = environment
        self._host = host
        self._settings = settings
        self._reporter = reporter
        self._ready_file = ready_file
        self._log_lines = log_lines
        self._start_times = start_times
        self._clock = clock
        self._started_at = clock.time()
        self._assignments = Assignments()
        self._workers: dict[WorkerId, HostedWorker] = {}
        """The running workers that have not exited."""
        self._ended: dict[HostedWorker, float] = {}
        """The exited workers whose threads still run, and when they exited."""
        self._waiting: dict[WorkerId, asyncio.Event] = {}
        """For each worker that waits for the shared session: an event that is set when the worker is released."""
        self._served = 0
        self._term = 0
        self._sequence = 0
        self._answers: list[str] = []
        self._report_due = False
        self._memory = ProcessMemory()
        self._executor_seconds: float | None = None
        self._ready = asyncio.Event()
        self._health = SessionHealth(settings.stray_timeout)
        self._draining = False
        self._forged = 0
        self._forged_logged_at = -math.inf
        self._control_warnings = ControlWarnings()
        self._connection: Connection | None = None
        self._exit_reason: ExitReason | None = None
        self._exit_requested = asyncio.Event()
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._exiting = False

    async def run(self, exit_process: Callable[[ExitReason], None]) -> None:
        """Work until an exit is requested, end all workers, and call `exit_process`, which ends the process."""
        async with asyncio.TaskGroup() as self._tasks:
            watchdog = LoopWatchdog(
                limit=self._settings.blocked_timeout, on_blocked=partial(self.end_blocked, exit_process)
            )
            self._reporter.report(Event.STARTED)
            self._tasks.create_task(endless("connection", self._stay_connected()), name="connection")
            self._tasks.create_task(endless("state-reports", self._report_regularly()), name="state-reports")
            self._tasks.create_task(endless("session-health", self._watch_session()), name="session-health")
            self._tasks.create_task(self._load(watchdog), name="loading")
            await self._exit_requested.wait()
            assert self._exit_reason is not None
            await self._shut_down(self._exit_reason)
            exit_process(self._exit_reason)

    def end_blocked(self, exit_process: Callable[[ExitReason], None], blocked: Blocked) -> None:
        """Report what blocks the event loop, and exit. Called by the thread of the watchdog."""
        worker = None if blocked.worker_id is None else self._workers.get(blocked.worker_id)
        if worker is not None:
            worker.report_blocked(blocked)  # as the end of that worker: the others are not to blame
        self._reporter.report_apart(self._environment.amqp_uri, Event.FAILED, reason=blocked.reason)
        exit_process(Unrecoverable(blocked.reason))

    def stop(self) -> None:
        """Stop all workers within `stop_grace` and exit (SIGTERM, SIGINT)."""
        self.request_exit(Stop(self._settings.stop_grace))

    def request_exit(self, reason: ExitReason) -> None:
        """End all workers and exit. The first reason counts."""
        if self._exit_reason is None:
            self._exit_reason = reason
        self._draining = True
        self._exit_requested.set()

    # -- questions of the leader -------------------------------------------------------------------------------------

    def handle(self, message: ControlMessage) -> None:
        """Handle a control message. If the process dies before it sends its report, the leader repeats the question
        until the driver lists the process as ended."""
        now = self._clock.time()
        if not is_plausible(message, now=now):
            self._count_forged()
            return
        if not is_plausible_term(self._term, now=now):
            self._term = 0  # the old term was accepted while this machine's clock was wrong
        if message.generation.term < self._term:
            return  # from a deposed leader
        # From the report with this term on, questions of earlier leaders have no effect here (lifecycle:
        # pooled-older-terms).
        self._term = message.generation.term
        try:
            question = question_of_control(message)
        except InvalidMessageError as error:
            log.warning("malformed control message", reason=error.message)
            self._refuse_malformed(message, error.message)
            return
        if question is None:
            return
        match question:
            case Assign():
                if self._assignments.assign(question, message.generation, now=now, closed=self._closed()):
                    self._start(question.environment)
            case Release():
                if self._assignments.release(question):
                    self._release(question.worker_id, question.grace)
            case Forget():
                self._assignments.forget(question)
            case Drain():
                self._drain()
            case ReportState():
                pass
        if question.question:
            # Answered even if it has had no effect: a repeated question needs an answer, too (lifecycle:
            # pooled-repeat).
            self._answers.append(question.question)
        self._report_soon()

    def _refuse_malformed(self, message: ControlMessage, reason: str) -> None:
        """Report the refusal to the leader, if the message names its worker."""
        worker, question = message.details.get("worker"), message.details.get("id")
        worker_id = worker.get("worker_id") if isinstance(worker, dict) else None
        if message.command is Command.ASSIGN and isinstance(worker_id, str) and worker_id and isinstance(question, str):
            self._assignments.refuse(WorkerId(worker_id), f"the message is malformed: {reason}")
            self._answers.append(question)
            self._report_soon()

    def _closed(self) -> str | None:
        """Why the process accepts no more workers; None if it does."""
        if self._exit_reason is not None:
            return "the process ends"
        return "the process takes no more assignments" if self._draining else None

    def _drain(self) -> None:
        self._draining = True
        self._end_if_empty()

    def _end_if_empty(self) -> None:
        if self._draining and not self._assignments.active:
            self.request_exit(Stop(None))

    # -- workers -----------------------------------------------------------------------------------------------------

    def _start(self, environment: WorkerEnvironment) -> None:
        self._all_ended.clear()
        self._log_lines.begin(environment.worker_id)
        self._tasks.create_task(self._run_worker(environment), name=f"assignment {environment.worker_id}")

    async def _run_worker(self, environment: WorkerEnvironment) -> None:
        """Run a worker to its end. It waits until the shared session is ready."""
        worker_id = environment.worker_id
        # Replaced below. Every assigned worker must be reported as exited.
        how = AssignmentExit(ExitCode.UNRECOVERABLE, "the worker could not be made")
        try:
            if not await self._may_run(worker_id):
                how = AssignmentExit(ExitCode.STOPPED, "released before it ran")
                return
            worker = self._workers[worker_id] = self._host.make_worker(environment)
            how = await worker.run()
        except Exception as error:  # of one worker: the others go on
            log.exception("worker could not be run", worker_id=worker_id)
            how = AssignmentExit(ExitCode.UNRECOVERABLE, describe_with_place(error))
        finally:
            # After `run`, with the connection closed: until then the worker may hold a request (lifecycle:
            # pooled-exit-when-closed).
            self._record_end(worker_id, how)
        if how.code == ExitCode.UNRECOVERABLE:
            await self._check_session()  # the cause may be the shared session

    async def _may_run(self, worker_id: WorkerId) -> bool:
        """Wait for the shared session; False if the worker was released, or the process is ending."""
        released = self._waiting[worker_id] = asyncio.Event()
        if not self._ready.is_set():
            await first_of(self._ready.wait(), released.wait())
        del self._waiting[worker_id]
        return not released.is_set() and self._exit_reason is None

    def _record_end(self, worker_id: WorkerId, how: AssignmentExit) -> None:
        self._assignments.exited(worker_id, how, self._log_lines.end(worker_id))
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            self._served += worker.requests
            self._ended[worker] = self._clock.monotonic()
        # Only workers that have not exited count: exited ones are listed until the leader forgets them.
        if not self._assignments.active:
            self._all_ended.set()
        self._report_soon()
        self._end_if_empty()

    def _release(self, worker_id: WorkerId, grace: float) -> None:
        """Stop a worker within `grace` seconds, and cut it off after that. A later release may shorten the time."""
        if (waiting := self._waiting.get(worker_id)) is not None:
            waiting.set()
        if (worker := self._workers.get(worker_id)) is not None:
            worker.request_exit(Stop(grace))
        self._clock.call_later(grace + CUT_OFF_DELAY, lambda: self._cut_off_soon(worker_id, grace))

    def _cut_off_soon(self, worker_id: WorkerId, grace: float) -> None:
        if worker_id in self._assignments.active and not self._exiting:
            self._tasks.create_task(self._cut_off(worker_id, grace), name=f"cut-off {worker_id}")

    async def _cut_off(self, worker_id: WorkerId, grace: float) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None:
            log.warning("worker cut off", worker_id=worker_id, grace=grace)
            try:
                await worker.cut_off(f"It did not end within {grace:g} s and was cut off.")
            except Exception:  # of one worker: the others go on
                log.exception("worker could not be cut off", worker_id=worker_id)

    def _check_left_behind(self) -> None:
        """Accept no more assignments if too many threads of ended workers still run: they use memory and processor
        time."""
        self._ended = {worker: since for worker, since in self._ended.items() if worker.left_behind}
        until = self._clock.monotonic() - LEFT_BEHIND_AFTER
        left = sum(worker.left_behind for worker, since in self._ended.items() if since <= until)
        if left > MAX_LEFT_BEHIND and not self._draining:
            log.warning("too many threads of ended workers run on, no more assignments", threads=left)
            self._drain()

    # -- connection and reports --------------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        await stay_connected(
            self._connect_and_listen,
            clock=self._clock,
            settings=self._settings,
            request_exit=self.request_exit,
            is_exiting=lambda: self._exiting,
        )

    async def _connect_and_listen(self, note_connected: Callable[[], None]) -> None:
        environment = self._environment
        options = ConnectionOptions(environment.amqp_uri, name=f"osrdyne-worker {environment.worker_id}")
        since = self._clock.monotonic()
        connection = self._connection = await connect(options)
        note_connected()
        if not self._ready.is_set():
            self._start_times.note("connection", self._clock.monotonic() - since)
        log.info("connected to RabbitMQ")
        # Do not bind the routing key of the group: a key of the pool may have the same name.
        routing_key = PoolNames(environment.pool).control_worker_routing_key(environment.worker_id)
        listening = listen(
            connection,
            environment,
            self.handle,
            routing_keys=(routing_key,),
            on_listening=self._report_soon,
            on_forged=self._count_forged,
            warnings=self._control_warnings,
            clock=self._clock,
        )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._reporter.send(connection), name="reports")
                group.create_task(listening, name="control")
                group.create_task(_wait_lost(connection), name="connection-lost")
        except* BrokerError as errors:
            lost = errors
        finally:
            await connection.close()
        raise BrokerUnavailableError(loss_of(lost))

    def _count_forged(self) -> None:
        """Count a dropped control message that the controller did not send; log the total."""
        self._forged += 1
        now = self._clock.monotonic()
        if now - self._forged_logged_at >= FORGED_INTERVAL:
            self._forged_logged_at = now
            log.warning("forged control messages dropped", messages=self._forged)

    async def _report_regularly(self) -> None:
        while True:
            try:
                async with asyncio.timeout(STATE_INTERVAL):
                    self._memory = await self._host.memory()
                    self._executor_seconds = await self._host.executor_seconds()
            except TimeoutError:
                log.warning("figures of the process unknown")
            except Exception:
                log.warning("figures of the process unknown", exc_info=True)
            self._check_left_behind()
            self._report_soon()
            await self._clock.sleep(STATE_INTERVAL)

    def _report_soon(self) -> None:
        """Schedule a report for the next iteration of the event loop: one report answers all questions that arrive
        together."""
        if not self._report_due:
            self._report_due = True
            asyncio.get_running_loop().call_soon(self._report)

    def _report(self) -> None:
        self._report_due = False
        # Rises with each report, so that the leader can ignore one that arrives late (lifecycle: pooled-sequence).
        self._sequence += 1
        state = ProcessState(
            sequence=self._sequence,
            term=self._term,
            answers=tuple(self._answers),
            ready=self._ready.is_set(),
            draining=self._draining,
            assignments=self._assignments.report(self._with_figures),
            refused=self._assignments.refused,
            memory=self._memory,
            requests=self._served + sum(worker.requests for worker in self._workers.values()),
            started_at=self._started_at,
            cold_start=self._start_times.milliseconds(),
            executor_seconds=self._executor_seconds,
        )
        # Taken into this report. If it is lost, the leader repeats the question and gets another answer.
        self._answers = []
        self._reporter.report(Event.PROCESS_STATE, **state.to_report(self._environment.worker_id).details)

    def _with_figures(self, assignment: Assignment) -> Assignment:
        worker = self._workers.get(assignment.worker_id)
        if worker is None:
            return assignment
        last_used = max(assignment.last_used, worker.last_used)
        return replace(assignment, in_flight=worker.in_flight, last_used=last_used)

    # -- the shared session ------------------------------------------------------------------------------------------

    async def _load(self, watchdog: LoopWatchdog) -> None:
        since = self._clock.monotonic()
        try:
            await self._host.start()
        except Exception as error:
            if self._settings.debug:
                log.exception("session could not be built")
            self.request_exit(StartFailed(describe_with_place(error)))
            return
        self._ready.set()
        watchdog.start()
        took = self._clock.monotonic() - since
        # If the session factory measures no parts, there is only the whole.
        for part, seconds in {"session": took, **self._host.start_times()}.items():
            self._start_times.note(part, seconds)
        self._start_times.note("ready", process_age() or took)
        cold_start = self._start_times.milliseconds()
        log.info("ready", seconds=round(took, 3), cold_start_ms=cold_start)
        self._reporter.report(Event.READY, **{COLD_START_FIELD: cold_start})
        self._ready_file.write()
        self._report_soon()

    async def _watch_session(self) -> None:
        await self._ready.wait()
        while True:
            await self._clock.sleep(BUSY_INTERVAL)
            await self._check_session()

    async def _check_session(self) -> None:
        """Exit if the shared session is lost or does not answer: then no worker of this process can work."""
        if not self._ready.is_set():
            return
        try:
            async with asyncio.timeout(BUSY_INTERVAL):
                failure = await self._host.loss()
            self._health.answered(strays={}, idle=False, now=self._clock.monotonic())
        except TimeoutError:
            log.warning("session does not answer")
            failure = self._health.timed_out(now=self._clock.monotonic())
        if failure is not None:
            self.request_exit(Unrecoverable(failure))

    # -- the end -----------------------------------------------------------------------------------------------------

    async def _shut_down(self, reason: ExitReason) -> None:
        """End all workers, publish the last reports, close the session."""
        self._ready_file.delete()
        if isinstance(reason, Stop):
            log.info("stopping", workers=len(self._assignments.active))
            self._reporter.report(Event.STOPPING)
        else:
            self._reporter.report(Event.FAILED, reason=reason.reason)
        grace = reason.grace if isinstance(reason, Stop) else None
        reserve = CLOSING_TIME if grace is None else min(CLOSING_TIME, grace / 2)
        limit = CLOSING_TIME if grace is None else grace - reserve
        await self._end_workers(reason if not isinstance(reason, Stop) else Stop(limit), limit)
        self._exiting = True
        self._report()
        await at_most(0.3 * reserve, self._reporter.flushed())
        if self._connection is not None:
            await at_most(0.2 * reserve, self._connection.close())
        # Last, because it may take long; if the time is over, the session ends with the process.
        try:
            await at_most(0.5 * reserve, self._host.close())
        except Exception:
            log.warning("session could not be closed", exc_info=True)

    async def _end_workers(self, reason: ExitReason, limit: float) -> None:
        """Make all workers exit; cut off those that have not exited within `limit` seconds."""
        for worker in self._workers.values():
            worker.request_exit(reason)
        if self._ready.is_set():  # otherwise no worker runs yet
            await at_most(limit, self._all_ended.wait())
        left = list(self._workers.values())
        await asyncio.gather(*(worker.cut_off("The process ends.") for worker in left))


async def _wait_lost(connection: Connection) -> None:
    await connection.wait_closed()
    raise BrokerUnavailableError("The connection to RabbitMQ was lost.")
