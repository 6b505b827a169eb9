"""The life of a worker process: connect, load, serve, stop. Made and run once by `main`.

Owns every task of the worker. The connection may come and go: session, data and threads stay. It ends with an `Ending`:
the first reason to end wins. Source: docs/reference/protocol/workers.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from osrdyne.aio.backoff import Backoff
from osrdyne.aio.clock import Clock, SystemClock
from osrdyne.aio.signals import WatchCell
from osrdyne.aio.tasks import endless
from osrdyne.amqp import ConnectionOptions
from osrdyne.errors import BrokerAccessError, BrokerError, BrokerUnavailableError, ConfigurationError
from osrdyne.logs import get_logger
from osrdyne.protocol.activity import BUSY_INTERVAL, FORGED_FIELD, GENERATION_FIELD, Event
from osrdyne.protocol.control import Command, ControlMessage
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.names import PoolNames, QueueName
from osrdyne.protocol.reply_addresses import ReplyAddresses
from osrdyne_worker.app.app import App
from osrdyne_worker.app.errors import describe_with_place
from osrdyne_worker.requests.dispatch import Dispatcher
from osrdyne_worker.requests.intake import Intake
from osrdyne_worker.requests.processor import Processor
from osrdyne_worker.requests.replies import ReplySender
from osrdyne_worker.requests.retries import Retries
from osrdyne_worker.requests.suspects import PoisonTexts
from osrdyne_worker.runtime.connection import Link, open_link
from osrdyne_worker.runtime.control import (
    ControlTrouble,
    WantedState,
    apply_control,
    is_believed,
    listen,
    parse_seconds,
    without_false_generation,
)
from osrdyne_worker.runtime.exit import AccessRefused, BeyondHelp, Ending, StartFailed, Stop, WrongConfiguration
from osrdyne_worker.runtime.loading import Loader, first_context
from osrdyne_worker.runtime.loop_watchdog import LoopWatchdog
from osrdyne_worker.runtime.ready_file import NO_READY_FILE, ReadyFile
from osrdyne_worker.runtime.reports import Reporter
from osrdyne_worker.runtime.session_health import SessionWatch
from osrdyne_worker.runtime.settings import runtime_settings

RECONNECT = Backoff(initial=0.2, maximum=4.0, jitter=0.3)
FORGED_INTERVAL = 5.0
"""Seconds between two reports of forged control messages."""
STABLE_AFTER = 10.0
"""Seconds after which a connection counts as good: losing it then is a first failure again."""
CLOSING_TIME = 5.0
"""Seconds out of `stop_grace` kept for the end: two fifths to give requests back, half for `on_stop` and the session,
the rest for the last reports. Whoever stops a worker kills it after `stop_grace`."""

log = get_logger("worker")


class Worker:
    """One worker. Raises `ConfigurationError` when the environment or the application cannot be used."""

    def __init__(
        self,
        app: App,
        environment: WorkerEnvironment,
        *,
        ready_file: ReadyFile = NO_READY_FILE,
        clock: Clock | None = None,
    ) -> None:
        self._environment = environment
        self._ready_file = ready_file
        self._clock = clock or SystemClock()
        self._settings = settings = runtime_settings(environment.config)
        # One thread for each request that runs, cancelled or not, and two for questions about them. Loading uses the
        # first.
        threads = settings.concurrency + settings.max_abandoned
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="handler")
        self._side_threads = ThreadPoolExecutor(2, thread_name_prefix="side")
        self._loader = Loader(app, first_context(environment), self._threads)
        self._dispatcher = Dispatcher(app, threads=self._threads, side_threads=self._side_threads, debug=settings.debug)
        self._reporter = Reporter(
            key=environment.key,
            worker_id=environment.worker_id,
            exchange=environment.activity_exchange,
            clock=self._clock,
        )
        self._wanted = WantedState(environment.requests_queues)
        self._queues: WatchCell[tuple[QueueName, ...]] = WatchCell(())
        self._ready = False
        self._control_trouble = ControlTrouble()
        self._forged = 0
        self._told_forged_at = -math.inf
        self._loading_done = False
        self._link: Link | None = None
        self._ending: Ending | None = None
        self._leaving = False
        self._end_asked = asyncio.Event()

    async def run(self, leave: Callable[[Ending], None]) -> None:
        """Work until there is a reason to end, wind everything up and call `leave` with it.

        `leave` ends the process: a thread or a task that does not end cannot be waited for.
        """
        self._watchdog = LoopWatchdog(
            limit=self._settings.blocked_timeout, on_blocked=lambda reason: leave(BeyondHelp(reason))
        )
        async with asyncio.TaskGroup() as group:
            self._processor = self._make_processor(group)
            self._reporter.report(Event.STARTED)
            group.create_task(endless("connection", self._stay_connected()), name="connection")
            group.create_task(endless("busy-reports", self._report_busy()), name="busy-reports")
            group.create_task(self._load(), name="loading")
            await self._end_asked.wait()
            assert self._ending is not None
            await self._wind_up(self._ending)
            leave(self._ending)

    def stop(self) -> None:
        """SIGTERM, SIGINT: finish or give back within `stop_grace`, then end. Also cuts a drain short."""
        self.end(Stop(self._settings.stop_grace))

    def end(self, ending: Ending) -> None:
        """Ask for the end; the first reason counts, but a stop with a limit replaces one without."""
        if self._ending is None or self._ending == Stop(None):
            self._ending = ending
        self._end_asked.set()
        self._update_queues()

    def _make_processor(self, group: asyncio.TaskGroup) -> Processor:
        return Processor(
            context=self._loader.context,
            dispatcher=self._dispatcher,
            reporter=self._reporter,
            sender=ReplySender(
                self._environment.worker_id,
                self._environment.max_message_bytes,
                self._clock,
                reference_statuses=self._settings.statuses == "reference",
            ),
            retries=Retries(self._environment.retry_exchange),
            addresses=ReplyAddresses(PoolNames(self._environment.pool), self._settings.reply_to_prefixes),
            settings=self._settings,
            spawn=group.create_task,
            give_up=self.end,
            clock=self._clock,
            poison=PoisonTexts(self._clock, self._environment.poison),
            on_alone=self._update_queues,
        )

    # -- loading -----------------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        since = self._clock.monotonic()
        try:
            self._processor.context = await self._loader.start()
        except Exception as error:
            if self._settings.debug:
                log.exception("the start of the application failed")
            self._loading_done = True
            self.end(StartFailed(describe_with_place(error)))
            return
        self._loading_done = self._ready = True
        self._watchdog.start()
        log.info("ready", seconds=round(self._clock.monotonic() - since, 3))
        self._reporter.report(Event.READY, in_flight=0)
        self._ready_file.write()
        self._update_queues()

    # -- serving -----------------------------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        environment = self._environment
        options = ConnectionOptions(environment.amqp_uri, name=f"osrdyne-worker {environment.worker_id}")
        failures, refused_since = 0, None
        while True:
            since = self._clock.monotonic()
            try:
                link = await open_link(options, self._clock)
                log.info("connected to RabbitMQ")
                await self._serve(link)
            except ConfigurationError as error:
                self.end(WrongConfiguration(f"WORKER_AMQP_URI: {error.message}"))
            except BrokerError as error:
                failures = 1 if self._clock.monotonic() - since > STABLE_AFTER else failures + 1
                if not self._leaving:
                    log.warning("no connection to RabbitMQ", reason=error.message, failures=failures)
                refused_since = (refused_since or since) if isinstance(error, BrokerAccessError) else None
                if refused_since is not None:
                    self._judge_refusal(error.message, self._clock.monotonic() - refused_since)
            await self._clock.sleep(RECONNECT.delay(failures))

    def _judge_refusal(self, reason: str, lasting: float) -> None:
        """The next worker may get other credentials; this one can only wait a while for its own to work again."""
        if lasting >= self._settings.queue_missing_timeout:
            self.end(AccessRefused(f"RabbitMQ has refused the log-in for {lasting:.0f} s: {reason}"))

    async def _serve(self, link: Link) -> None:
        """Serve on one connection until it is lost; raises `BrokerError` then."""
        if self._link is not None:
            self._report_state()
        self._link = link
        lost: ExceptionGroup[BrokerError]
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(link.wait_lost(), name="connection-lost")
                group.create_task(self._reporter.send(link.connection), name="reports")
                listening = listen(
                    link.connection,
                    self._environment,
                    self._handle_control,
                    on_listening=self._report_that_it_listens,
                    on_forged=self._count_forged,
                    trouble=self._control_trouble,
                    clock=self._clock,
                )
                group.create_task(listening, name="control")
                group.create_task(self._run_intakes(link, group), name="intakes")
        except* BrokerError as errors:
            lost = errors
        finally:
            await link.close()
        raise BrokerUnavailableError(_reason_of(lost))

    async def _run_intakes(self, link: Link, group: asyncio.TaskGroup) -> None:
        """One intake for every queue that was ever wanted; each looks itself whether it is wanted now."""
        started: set[QueueName] = set()
        while True:
            for queue in self._queues.value:
                if queue not in started:
                    started.add(queue)
                    intake = Intake(
                        link,
                        queue,
                        queues=self._queues,
                        processor=self._processor,
                        settings=self._settings,
                        give_up=self.end,
                        clock=self._clock,
                    )
                    group.create_task(intake.run(), name=f"intake-{queue}")
            await self._queues.changed()

    def _update_queues(self) -> None:
        taking = self._ready and not self._wanted.paused and self._ending is None
        taking = taking and not self._processor.runs_alone
        self._queues.set(self._wanted.queues if taking else ())

    # -- control and reports -----------------------------------------------------------------------------------------

    def _handle_control(self, message: ControlMessage) -> None:
        now = self._clock.time()
        if not is_believed(message, now=now):
            self._count_forged()
            return
        self._wanted = without_false_generation(self._wanted, now=now)
        match message.command:
            case Command.CANCEL:
                correlation_id, reply_to = message.details.get("correlation_id"), message.details.get("reply_to")
                if isinstance(correlation_id, str) and isinstance(reply_to, str):
                    keep_for = parse_seconds(message.details.get("keep_for"))
                    self._processor.cancel(correlation_id, reply_to, keep_for=keep_for)
            case Command.POISON:
                self._processor.poison.add(message.details.get("texts"))
            case Command.DRAIN:
                if message.generation >= self._wanted.generation:
                    self.end(Stop(None))
            case _:
                self._wanted = apply_control(self._wanted, message)
                self._update_queues()
                self._report_state()

    def _count_forged(self) -> None:
        """Drop a message that the controller did not send; report and log how many there were, once in a while."""
        self._forged += 1
        self._report_forged()

    def _report_forged(self) -> None:
        now = self._clock.monotonic()
        if self._forged and self._ending is None and now - self._told_forged_at >= FORGED_INTERVAL:
            self._told_forged_at = now
            log.warning("forged control messages dropped", messages=self._forged)
            self._report_state()

    def _report_that_it_listens(self) -> None:
        """What the controller had to say after an earlier report, it could not: of a cancel, say."""
        if self._ending is None:  # a report after the last one would be taken for a worker that goes on
            self._report_state()

    def _report_state(self) -> None:
        """Tell the controller what this worker is doing now: a new leader learns it this way."""
        in_flight = self._processor.in_flight
        event = Event.STARTED if not self._ready else Event.BUSY if in_flight else Event.READY
        forged = {FORGED_FIELD: self._forged} if self._forged else {}
        self._forged = 0
        told = {GENERATION_FIELD: list(self._wanted.generation), **forged}
        self._reporter.report(event, in_flight=in_flight, paused=self._wanted.paused, **told)

    async def _report_busy(self) -> None:
        """While anything runs, say so every few seconds, with the session's progress; and see that it still lives."""
        watch = SessionWatch(self._settings.stray_timeout)
        while True:
            await self._clock.sleep(BUSY_INTERVAL)
            self._report_forged()
            if not self._ready:
                continue
            progress: Mapping[str, int] = {}
            try:
                async with asyncio.timeout(BUSY_INTERVAL):
                    trouble = await self._look_at_session(watch)
                    progress = await self._processor.progress()
            except TimeoutError:
                log.warning("the session does not answer")
                trouble = watch.was_silent(now=self._clock.monotonic())
            if trouble is not None:
                self.end(BeyondHelp(trouble))
            if self._processor.in_flight:
                self._reporter.report(Event.BUSY, **{"in_flight": self._processor.in_flight, **progress})

    async def _look_at_session(self, watch: SessionWatch) -> str | None:
        """Why the session is of no use any more, or None."""
        session = self._processor.context.session
        alive = await self._dispatcher.is_alive(session)
        strays = await self._dispatcher.stray_tasks(session) if alive else {}
        idle = self._processor.in_flight == 0
        return watch.answered(alive=alive, strays=strays, idle=idle, now=self._clock.monotonic())

    # -- ending ------------------------------------------------------------------------------------------------------

    async def _wind_up(self, ending: Ending) -> None:
        """Let go of the queues, finish or give back, stop the application, send the last reports."""
        self._ready_file.delete()
        if isinstance(ending, Stop):
            log.info("stopping", in_flight=self._processor.in_flight)
            self._reporter.report(Event.STOPPING)
        else:
            self._reporter.report(Event.FAILED, reason=ending.reason)
        reserve = min(CLOSING_TIME, self._settings.stop_grace / 2) if isinstance(ending, Stop) else CLOSING_TIME
        await self._finish_requests(reserve)
        if self._loading_done:
            await _at_most(0.5 * reserve, self._loader.stop(started=self._ready))
        self._reporter.flush()
        await _at_most(0.1 * reserve, self._reporter.flushed())
        self._leaving = True
        if self._link is not None:
            await self._link.close()

    async def _finish_requests(self, reserve: float) -> None:
        """Give back what waits; what runs has the grace period less the reserve, and is given back then."""
        self._processor.give_back()
        while isinstance(self._ending, Stop) and self._processor.in_flight:
            limit = self._ending.grace
            if limit is not None:
                await _at_most(limit - reserve, self._processor.until_idle())
                break
            self._end_asked.clear()
            await _first_of(self._processor.until_idle(), self._end_asked.wait())
        self._processor.give_back(also_running=True)
        await _at_most(0.4 * reserve, self._processor.until_idle())


def _reason_of(group: BaseExceptionGroup[BrokerError]) -> str:
    first = group.exceptions[0]
    return _reason_of(first) if isinstance(first, BaseExceptionGroup) else first.message


async def _at_most(seconds: float, coroutine: Coroutine[Any, Any, None]) -> None:
    """Await it for so long and no longer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await coroutine


async def _first_of(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Return when one of them does; the others are cancelled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
