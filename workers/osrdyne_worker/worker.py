"""The life of a worker: connect, load the application, serve, stop. Run once by `main`, for each key by `pooled`.

A `Worker` owns all its tasks. Connections come and go; session, data and threads stay. The first reason to
exit wins. Source: docs/reference/protocol/workers.md.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from osrdyne.aio.signals import WatchCell
from osrdyne.aio.tasks import at_most, endless, first_of
from osrdyne.amqp import ConnectionOptions
from osrdyne.errors import BrokerError, BrokerUnavailableError
from osrdyne.logs import get_logger
from osrdyne.protocol.activity import (
    BLOCKED_FIELD,
    BUSY_INTERVAL,
    COLD_START_FIELD,
    EMPTY_PROBE_FIELD,
    EXECUTOR_SECONDS_FIELD,
    FORGED_FIELD,
    GENERATION_FIELD,
    MAX_PROBE_ID,
    MAX_RELOAD_ID,
    MAX_RELOADS,
    RELOADS_FIELD,
    WAITING_FOR_FIELD,
    Event,
)
from osrdyne.protocol.control import Command, ControlMessage
from osrdyne.protocol.messages import header_text
from osrdyne.protocol.names import PoolNames, QueueName
from osrdyne.protocol.rates import RATE_FIELD, rate_from_wire
from osrdyne.protocol.refusals import REFUSAL_FIELD
from osrdyne_worker.app.errors import describe_with_place, refusal_of_key
from osrdyne_worker.bootstrap import WorkerParts
from osrdyne_worker.requests.intake import Intake
from osrdyne_worker.requests.probe import ProbeIntake
from osrdyne_worker.requests.processor import Processor
from osrdyne_worker.runtime.connection import BrokerConnection, loss_of, open_broker_connection, stay_connected
from osrdyne_worker.runtime.control import (
    FORGED_INTERVAL,
    ControlWarnings,
    DesiredState,
    apply_control,
    is_plausible,
    listen,
    parse_seconds,
    without_implausible_generation,
)
from osrdyne_worker.runtime.exit import ExitReason, LoopBlocked, StartFailed, Stop, Unrecoverable
from osrdyne_worker.runtime.loop_watchdog import Blocked, LoopWatchdog
from osrdyne_worker.runtime.session_health import SessionHealth
from osrdyne_worker.runtime.settings import RuntimeContext

RELOAD_ERROR_LIMIT = 500
"""Characters of the error of a reload in a report."""
MAX_REMEMBERED_PROBES = 100
"""Ids of probes by which the worker recognises a repeated control message."""
CLOSING_TIME = 5.0
"""Seconds of `stop_grace` that are reserved for the exit: two fifths to requeue requests, half for `on_stop` and the
session, the rest for the last reports. Drivers kill a worker after `stop_grace`."""

log = get_logger("worker")


class Worker:
    """One worker."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._environment = parts.environment
        self._settings = parts.settings
        self._clock = parts.clock
        self._reporter = parts.reporter
        self._desired = DesiredState(parts.environment.requests_queues, paused=parts.environment.paused)
        self._queues: WatchCell[tuple[QueueName, ...]] = WatchCell(())
        """The queues that the worker consumes now; none until it is ready."""
        self._probes: asyncio.Queue[str] = asyncio.Queue()
        """The ids of the requested probes for which no request was taken yet."""
        self._must_reconnect = asyncio.Event()
        self._last_probes: deque[str] = deque(maxlen=MAX_REMEMBERED_PROBES)
        self._loading_done = False
        self._ready = False
        self._broker: BrokerConnection | None = None
        self._watchdog: LoopWatchdog | None = None
        self._control_warnings = ControlWarnings()
        self._reloads: dict[str, str | None] = {}
        """The outcomes of the last reloads that the controller has asked for: an error, or None."""
        self._reloading: set[str] = set()
        self._executor_seconds: float | None = None
        """As it was reported last; None if the session does not report it."""
        self._completed_at_query = -1
        """The number of completed requests when the session was last queried for it."""
        self._forged = 0
        self._forged_reported_at = -math.inf
        self._exit_reason: ExitReason | None = None
        self._exit_requested = asyncio.Event()
        self._exiting = False

    async def run(self, exit_process: Callable[[ExitReason], None]) -> None:
        """Work until there is a reason to exit, shut down and call `exit_process` with the reason.

        `exit_process` must end the process, or raise: then this method ends once all its threads and tasks have ended,
        and some never do.
        """
        async with asyncio.TaskGroup() as group:
            self._runtime = RuntimeContext(self._settings, self._clock, partial(_spawn, group), self.request_exit)
            self._processor: Processor = self._parts.make_processor(
                self._runtime, self._parts.loader.context, on_alone=self._alone_changed
            )
            if self._parts.owns_process:
                self._watchdog = LoopWatchdog(
                    limit=self._settings.blocked_timeout, on_blocked=partial(self._end_blocked, exit_process)
                )
            # Queued before there is a connection: the leader learns of the worker as soon as one is open.
            self._reporter.report(Event.STARTED)
            group.create_task(endless("connection", self._stay_connected()), name="connection")
            group.create_task(endless("busy-reports", self._report_busy()), name="busy-reports")
            # Beside the connection: heartbeats and control messages continue while the application loads.
            group.create_task(self._load(), name="loading")
            await self._exit_requested.wait()
            assert self._exit_reason is not None
            await self._shut_down(self._exit_reason)
            exit_process(self._exit_reason)

    def stop(self) -> None:
        """Finish or requeue the requests within `stop_grace`, then exit (SIGTERM, SIGINT). Also ends a drain early."""
        self.request_exit(Stop(self._settings.stop_grace))

    def request_exit(self, reason: ExitReason) -> None:
        """Shut down and exit. The first reason counts, but any later one replaces a drain."""
        # A drain has no limit: a later stop or failure must be able to end it.
        if self._exit_reason is None or self._exit_reason == Stop(None):
            self._exit_reason = reason
        self._exit_requested.set()
        self._update_queues()

    @property
    def is_loading(self) -> bool:
        """Whether the application is being loaded, for the first time."""
        return not self._loading_done

    def report_blocked(self, blocked: Blocked) -> None:
        """Report that this worker ends because its code blocks the event loop. Called by the thread of the watchdog."""
        details = {} if blocked.text is None else {BLOCKED_FIELD: blocked.text}
        self._reporter.report_apart(self._environment.amqp_uri, Event.FAILED, reason=blocked.reason, **details)

    def _end_blocked(self, exit_process: Callable[[ExitReason], None], blocked: Blocked) -> None:
        # Crash before: the leader knows the cause only from the log. RabbitMQ returns the requests in either case.
        self.report_blocked(blocked)
        exit_process(Unrecoverable(blocked.reason))

    async def disconnect(self) -> None:
        """Close the connection: RabbitMQ requeues the requests. For a worker whose `run` is being cancelled."""
        self._exiting = True
        if self._broker is not None:
            await self._broker.close()

    # -- loading -----------------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        since = self._clock.monotonic()
        try:
            self._processor.data.loaded(await self._parts.loader.start())
        except Exception as error:
            if self._settings.debug:
                log.exception("application start failed")
            self._loading_done = True
            # Loading has ended, though without success: the session may have been built, and is closed at the exit.
            self.request_exit(StartFailed(describe_with_place(error), refusal_of_key(error)))
            return
        self._loading_done = self._ready = True
        if self._watchdog is not None:
            # Not before: loading may block the loop for long without being a fault.
            self._watchdog.start()
        cold_start = self._parts.start_times.milliseconds()
        log.info("ready", seconds=round(self._clock.monotonic() - since, 3), cold_start_ms=cold_start)
        paused = self._desired.paused
        # Zero, so that the leader counts the tasks of the start, too.
        details = {COLD_START_FIELD: cold_start, EXECUTOR_SECONDS_FIELD: 0.0}
        self._reporter.report(Event.READY, in_flight=0, paused=paused, **details)
        self._parts.ready_file.write()
        self._update_queues()
        for reload_id in list(self._reloading):
            self._runtime.spawn(self._reload(reload_id))

    # -- serving -----------------------------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        await stay_connected(
            self._connect_and_serve,
            clock=self._clock,
            settings=self._settings,
            request_exit=self.request_exit,
            is_exiting=lambda: self._exiting,
        )

    async def _connect_and_serve(self, note_connected: Callable[[], None]) -> None:
        environment = self._environment
        options = ConnectionOptions(environment.amqp_uri, name=f"osrdyne-worker {environment.worker_id}")
        broker = await open_broker_connection(options, self._clock)
        note_connected()
        log.info("connected to RabbitMQ")
        await self._serve(broker)

    async def _serve(self, broker: BrokerConnection) -> None:
        """Serve on one connection until it is lost. Raises `BrokerError` then."""
        if self._broker is not None:
            # Not the first connection: reports may have been lost with the last one, and there may be a new leader.
            self._report_state()
        # Set before the tasks begin: a shutdown that comes now must find the connection that it has to close.
        self._broker = broker
        lost: ExceptionGroup[BrokerError]
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(broker.wait_lost(), name="connection-lost")
                group.create_task(self._reporter.send(broker.connection), name="reports")
                listening = listen(
                    broker.connection,
                    self._environment,
                    self._handle_control,
                    routing_keys=self._control_routing_keys(),
                    on_listening=self._report_listening,
                    on_forged=self._count_forged,
                    credit=self._processor.streams,
                    warnings=self._control_warnings,
                    clock=self._clock,
                )
                group.create_task(listening, name="control")
                group.create_task(self._run_intakes(broker, group), name="intakes")
                group.create_task(self._run_probes(broker), name="probes")
                group.create_task(self._leave_on_request(broker), name="reconnect")
        except* BrokerError as errors:
            lost = errors
        finally:
            await broker.close()
        raise BrokerUnavailableError(loss_of(lost))

    def _control_routing_keys(self) -> tuple[str, ...]:
        names, environment = PoolNames(self._environment.pool), self._environment
        return (
            names.control_group_routing_key(environment.key),
            names.control_worker_routing_key(environment.worker_id),
        )

    async def _run_intakes(self, broker: BrokerConnection, group: asyncio.TaskGroup) -> None:
        """Start one intake for each queue when it is first desired; the intake pauses while its queue is not."""
        # One intake for each queue and connection, also while it pauses: two would share a level and count twice.
        started: set[QueueName] = set()
        while True:
            for queue in self._queues.value:
                if queue not in started:
                    started.add(queue)
                    intake = Intake(self._runtime, broker, queue, queues=self._queues, processor=self._processor)
                    group.create_task(intake.run(), name=f"intake-{queue}")
            await self._queues.changed()

    async def _leave_on_request(self, broker: BrokerConnection) -> None:
        """End this connection once the controller asks for it and no request runs: acknowledgements need the connection
        over which a request came."""
        self._must_reconnect.clear()  # asked for on an earlier connection
        await self._must_reconnect.wait()
        await self._processor.until_idle()
        log.info("connecting to RabbitMQ again")
        broker.fail()

    async def _run_probes(self, broker: BrokerConnection) -> None:
        """Take one request for each probe that the controller requests on this connection. A probe that a lost
        connection interrupts has no outcome; the controller then sends another one."""
        intake = ProbeIntake(broker, self._processor)
        # A queue, because each probe needs its own request: the controller sends those of several circuits at once.
        probes = self._probes = asyncio.Queue()
        try:
            while True:
                probe_id = await probes.get()
                if not self._ready or self._exit_reason is not None:
                    continue
                if not await intake.take_one(probe_id, self._desired.queues):
                    self._report_state(**{EMPTY_PROBE_FIELD: probe_id})
        finally:
            intake.close()

    def _alone_changed(self) -> None:
        """Stop consuming before a suspect runs alone, and continue after it."""
        self._update_queues()
        if not self._processor.runs_alone and not self._queues.value:
            # Paused meanwhile: the requests that have waited here for the end of the suspect must not run.
            self._processor.requeue()

    def _update_queues(self) -> None:
        """Consume the desired queues, or none while the worker must not take requests."""
        taking = self._ready and not self._desired.paused and self._exit_reason is None
        # If a suspect kills the worker, the deliveries of all other requests count as failed: take none meanwhile.
        taking = taking and not self._processor.runs_alone
        self._queues.set(self._desired.queues if taking else ())

    # -- control and reports -----------------------------------------------------------------------------------------

    def _handle_control(self, message: ControlMessage) -> None:
        now = self._clock.time()
        if not is_plausible(message, now=now):
            self._count_forged()
            return
        # Otherwise this worker would ignore its leader until the clock reaches that term.
        self._desired = without_implausible_generation(self._desired, now=now)
        match message.command:
            case Command.CANCEL:
                correlation_id, reply_to = message.details.get("correlation_id"), message.details.get("reply_to")
                if isinstance(correlation_id, str) and isinstance(reply_to, str):
                    keep_for = parse_seconds(message.details.get("keep_for"))
                    self._processor.cancel(correlation_id, reply_to, keep_for=keep_for)
            case Command.POISON:
                self._processor.refused_texts.add(message.details.get("texts"))
            case Command.RATE:
                if message.generation >= self._desired.generation:
                    self._use_rate(message.details.get(RATE_FIELD))
            case Command.RELOAD:
                reload_id = message.details.get("id")
                valid = isinstance(reload_id, str) and len(reload_id) <= MAX_RELOAD_ID
                if valid and message.generation >= self._desired.generation:
                    self._request_reload(str(reload_id))
            case Command.RECONNECT:
                self._must_reconnect.set()
            case Command.PROBE:
                probe_id = message.details.get("id")
                valid = isinstance(probe_id, str) and 0 < len(probe_id) <= MAX_PROBE_ID
                if valid and message.generation >= self._desired.generation:
                    self._request_probe(str(probe_id))
            case Command.DRAIN:
                # An old drain may be on its way from a leader that was deposed; a cancel is harmless at any age.
                if message.generation >= self._desired.generation:
                    self.request_exit(Stop(None))
            case _:
                self._desired = apply_control(self._desired, message)
                self._update_queues()
                self._report_state()

    def _use_rate(self, value: object) -> None:
        try:
            self._processor.budget.use(rate_from_wire(value))
        except ValueError as error:
            log.warning("malformed rate in a control message", reason=str(error))
        self._report_state()

    def _request_probe(self, probe_id: str) -> None:
        # A repeated id changes nothing: exactly one request passes.
        if probe_id not in self._last_probes:
            self._last_probes.append(probe_id)
            self._probes.put_nowait(probe_id)

    def _request_reload(self, reload_id: str) -> None:
        """Load the data again for the controller; while the worker still loads, once it is ready."""
        if reload_id in self._reloads:
            self._report_state()  # the report of the outcome was lost
        elif reload_id not in self._reloading and len(self._reloading) < MAX_RELOADS:
            self._reloading.add(reload_id)
            if self._ready:
                self._runtime.spawn(self._reload(reload_id))

    async def _reload(self, reload_id: str) -> None:
        error: str | None = None
        try:
            # The operator has announced a change of the data, whatever versions requests have named.
            await self._processor.data.reload(forget=True)
        except Exception as failure:
            error = header_text(describe_with_place(failure), limit=RELOAD_ERROR_LIMIT)
        self._reloading.discard(reload_id)
        self._reloads[reload_id] = error
        while len(self._reloads) > MAX_RELOADS:
            del self._reloads[next(iter(self._reloads))]
        self._report_state()

    def _count_forged(self) -> None:
        """Count a dropped control message that the controller did not send."""
        self._forged += 1
        self._report_forged()

    def _report_forged(self) -> None:
        """Log and report the number of forged messages, at most every `FORGED_INTERVAL` seconds."""
        now = self._clock.monotonic()
        if self._forged and self._exit_reason is None and now - self._forged_reported_at >= FORGED_INTERVAL:
            self._forged_reported_at = now
            log.warning("forged control messages dropped", messages=self._forged)
            self._report_state()

    def _report_listening(self) -> None:
        """Report the state when control messages can arrive: the controller then repeats what the worker has missed."""
        if self._exit_reason is None:  # after the report `stopping`, this one would mean that the worker continues
            self._report_state()

    def _report_state(self, **more: object) -> None:
        """Report the state of this worker, for a leader that does not have it."""
        in_flight = self._processor.in_flight
        event = Event.STARTED if not self._ready else Event.BUSY if in_flight else Event.READY
        forged = {FORGED_FIELD: self._forged} if self._forged else {}
        self._forged = 0
        rate = self._processor.budget.rate
        details: dict[str, object] = {
            GENERATION_FIELD: list(self._desired.generation),
            RATE_FIELD: None if rate is None else rate.to_wire(),
            **forged,
            **more,
        }
        if self._ready:
            if self._reloads:
                details[RELOADS_FIELD] = dict(self._reloads)
            details[COLD_START_FIELD] = {**self._parts.start_times.milliseconds(), **self._reporter.first_request}
            if self._executor_seconds is not None:
                details[EXECUTOR_SECONDS_FIELD] = self._executor_seconds
        self._reporter.report(event, in_flight=in_flight, paused=self._desired.paused, **details)

    async def _report_busy(self) -> None:
        """While requests run, report the progress of the session every `BUSY_INTERVAL`; exit if the session fails."""
        health = SessionHealth(self._settings.stray_timeout)
        while True:
            await self._clock.sleep(BUSY_INTERVAL)
            self._report_forged()
            if not self._ready:
                if (waiting_for := self._parts.loader.waiting_for) is not None and self._exit_reason is None:
                    self._reporter.report(Event.STARTED, **{WAITING_FOR_FIELD: waiting_for})
                continue
            progress: Mapping[str, int] = {}
            took = self._executor_seconds
            try:
                async with asyncio.timeout(BUSY_INTERVAL):
                    failure = await self._check_session(health)
                    progress = await self._processor.progress()
                    took = await self._query_executor_seconds()
            except TimeoutError:
                log.warning("session does not answer")
                failure = health.timed_out(now=self._clock.monotonic())
            if failure is not None:
                self.request_exit(Unrecoverable(failure))
            is_new, self._executor_seconds = took != self._executor_seconds, took
            if self._processor.in_flight:
                known = {} if took is None else {EXECUTOR_SECONDS_FIELD: took}
                self._reporter.report(Event.BUSY, **{"in_flight": self._processor.in_flight, **progress, **known})
            elif is_new and self._exit_reason is None:
                self._report_state()

    async def _query_executor_seconds(self) -> float | None:
        """Return the time of the tasks so far. Queries the session only if requests have run since the last query."""
        completed = self._parts.reporter.completed_requests
        if self._processor.in_flight or completed != self._completed_at_query:
            self._completed_at_query = completed
            return await self._parts.dispatcher.executor_seconds(self._processor.context.session)
        return self._executor_seconds

    async def _check_session(self, health: SessionHealth) -> str | None:
        """Why the session is unusable, or None."""
        session, dispatcher = self._processor.context.session, self._parts.dispatcher
        if not await dispatcher.is_alive(session):
            return await dispatcher.loss_reason(session)
        strays = await dispatcher.stray_tasks(session)
        idle = self._processor.in_flight == 0
        return health.answered(strays=strays, idle=idle, now=self._clock.monotonic())

    # -- shutting down -----------------------------------------------------------------------------------------------

    async def _shut_down(self, reason: ExitReason) -> None:
        """Finish or requeue the requests, stop the application, publish the last reports."""
        # First: for the platform, a worker that takes no more requests must not be ready.
        self._parts.ready_file.delete()
        if isinstance(reason, Stop):
            log.info("stopping", in_flight=self._processor.in_flight)
            self._reporter.report(Event.STOPPING)
        else:
            details: dict[str, object] = {}
            if isinstance(reason, StartFailed) and reason.refusal is not None:
                details[REFUSAL_FIELD] = reason.refusal.to_wire()
            if isinstance(reason, LoopBlocked) and reason.text is not None:
                details[BLOCKED_FIELD] = reason.text
            # Lost: the start counts as a failed one, and the next attempt reports the refusal again.
            self._reporter.report(Event.FAILED, reason=reason.reason, **details)
        reserve = CLOSING_TIME
        if isinstance(reason, Stop):
            reserve = min(CLOSING_TIME, (self._settings.stop_grace if reason.grace is None else reason.grace) / 2)
        # Before the session is closed, which may take long: other workers can run the requeued requests meanwhile.
        await self._finish_requests(reserve)
        # A coroutine that stops the application would wait behind the one that blocks its loop.
        if self._loading_done and not isinstance(reason, LoopBlocked):
            await at_most(0.5 * reserve, self._parts.loader.stop(started=self._ready))
        self._reporter.flush()
        await at_most(0.1 * reserve, self._reporter.flushed())
        self._exiting = True
        if self._broker is not None:
            await self._broker.close()

    async def _finish_requests(self, reserve: float) -> None:
        """Requeue waiting requests. Running ones have the grace period less `reserve`, and are requeued then."""
        self._processor.requeue()
        while isinstance(self._exit_reason, Stop) and self._processor.in_flight:
            limit = self._exit_reason.grace
            if limit is not None:
                await at_most(limit - reserve, self._processor.until_idle())
                break
            # A drain has no limit, but another reason to exit ends it.
            self._exit_requested.clear()
            await first_of(self._processor.until_idle(), self._exit_requested.wait())
        # Not left to the closing connection: from RabbitMQ 4.3 on, that counts as a failed delivery, and a requeue does
        # not (broker: count-failures-by-reject).
        self._processor.requeue(also_running=True)
        await at_most(0.4 * reserve, self._processor.until_idle())


def _spawn(group: asyncio.TaskGroup, coroutine: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
    """Start a task of a worker; return a cancelled future if the worker has been cancelled.

    The tasks of the worker are cancelled as well then, and their clean-up must not fail. An interrupted request, for
    example, needs no outcome any more: RabbitMQ requeues it when the connection is closed.
    """
    try:
        return group.create_task(coroutine)
    except RuntimeError:  # the group is shutting down
        coroutine.close()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.cancel()
        return future
