"""The path of a request through the worker: check it, run its handler, reply with a confirm, acknowledge it.

Intakes pass deliveries to `Processor.accept`, which starts one task for each. The deadline, the caller's cancel, a
pause and a lost channel interrupt that task. Source: docs/reference/protocol/workers.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from osrdyne.aio.clock import now_ms
from osrdyne.amqp import Channel, Delivery
from osrdyne.amqp.direct_reply_to import DIRECT_REPLY_TO
from osrdyne.errors import BrokerError, InvalidMessageError, PublishRefusedError
from osrdyne.logs import get_logger
from osrdyne.protocol.activity import MAX_NAMED_REQUESTS, REPLY_TO_REFUSED, RETRIED, Event, text_fingerprint
from osrdyne.protocol.data_versions import DATA_RELOADED_HEADER, DATA_VERSION_HEADER, required_data_version
from osrdyne.protocol.messages import (
    COALESCE_HEADER,
    REPLAY_HEADER,
    ROUTE_HEADER,
    Request,
    Response,
    header_text,
    without_identity,
)
from osrdyne.protocol.names import ReplyAddresses
from osrdyne.protocol.rates import EventRate
from osrdyne.protocol.retries import read_attempts
from osrdyne.protocol.statuses import decode_text
from osrdyne.protocol.streams import read_wanted_credit
from osrdyne_worker.app.app import Context
from osrdyne_worker.app.call import Call
from osrdyne_worker.app.codec import error_response, shown_path
from osrdyne_worker.app.errors import DataChangedError, RequestError
from osrdyne_worker.requests.cancellations import Cancellations
from osrdyne_worker.requests.data_versions import DataLoading, DataVersions
from osrdyne_worker.requests.dispatch import Dispatcher, SessionLostError
from osrdyne_worker.requests.inflight import InFlight, Interruption, Phase
from osrdyne_worker.requests.outcome import Outcome, Result, early_result, result_of, time_left, time_to_work
from osrdyne_worker.requests.replies import ProgressSender, ReplySender
from osrdyne_worker.requests.retries import Retries, counted, priority_of_delivery
from osrdyne_worker.requests.scheduling.batches import Batches
from osrdyne_worker.requests.scheduling.coalescing import Coalescing
from osrdyne_worker.requests.scheduling.prefetch import HeldRequest
from osrdyne_worker.requests.scheduling.priorities import PriorityLevel, PriorityLevels, Slots
from osrdyne_worker.requests.scheduling.rates import EventBudget
from osrdyne_worker.requests.scheduling.suspects import (
    ALONE_TIMEOUT,
    PATIENCE,
    SUSPECT_PRIORITY,
    VERDICT_TIME,
    DeathEvidence,
    RefusedTexts,
    SuspectGate,
    is_suspect,
    refusal,
)
from osrdyne_worker.requests.streams import MAX_PAUSED, Streams
from osrdyne_worker.runtime.connection import BrokerConnection
from osrdyne_worker.runtime.exit import Unrecoverable
from osrdyne_worker.runtime.reports import Completion, Reporter
from osrdyne_worker.runtime.settings import RuntimeContext

if TYPE_CHECKING:
    from osrdyne_worker.app.streams import ArrowStream

MAX_WAITING_FOR_DATA = 100
"""Requests that wait for a reload without keeping further ones from coming."""

MAX_ROUTE = 200
"""Characters of a route's name in a report."""

log = get_logger("worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """How requests are answered: to which addresses, by what, and after which outcomes they are tried again instead."""

    addresses: ReplyAddresses
    replies: ReplySender
    retries: Retries


class Processor:
    """Processes requests, at most `concurrency` at once.

    A request goes through the methods below in this order: `accept`, `_process`, `_work`, `_check`, `_count_events`,
    `_wait_for_data`, `_run_in_slot` (a suspect: `_run_alone`), `_run_handler`, `_settle`, `_answer`, `_report`.
    `_interrupt` stops it at any step.
    """

    def __init__(
        self,
        runtime: RuntimeContext,
        context: Context,
        *,
        dispatcher: Dispatcher,
        reporter: Reporter,
        answering: Answering,
        refused_texts: RefusedTexts | None = None,
        suspect_gate: SuspectGate | None = None,
        on_alone: Callable[[], None] = lambda: None,
        loading: DataLoading | None = None,
        rate: EventRate | None = None,
    ) -> None:
        """`on_alone` is called when `runs_alone` changes. `loading` reloads the data; None: it never changes.
        `suspect_gate`: of the process, if others share it. `rate`: of the events that it serves; None: no limit."""
        self.data = DataVersions(context, loading, runtime)
        self._runtime = runtime
        self._settings = runtime.settings
        self._clock = runtime.clock
        self._dispatcher = dispatcher
        self._reporter = reporter
        self._replies = answering.replies
        self._progress = ProgressSender(answering.replies, runtime.spawn)
        # Shared by all requests of the worker: one warning for each meaningless header, not one for each request.
        self._retries = answering.retries
        self._addresses = answering.addresses
        self._cancellations = Cancellations(self._clock)
        self.refused_texts = refused_texts or RefusedTexts(self._clock)
        self._suspect_gate = suspect_gate or SuspectGate()
        self.levels = PriorityLevels(self._clock)
        self.budget = EventBudget(self._clock, rate)
        self._slots = Slots(self._settings.concurrency, levels=self.levels, spawn=runtime.spawn, budget=self.budget)
        self._batches = Batches(
            dispatcher,
            self._slots,
            self._clock,
            spawn=runtime.spawn,
            begin=self._begin_together,
            confirm_running=reporter.confirm_running,
        )
        self._coalescing = Coalescing(
            dispatcher,
            self._slots,
            spawn=runtime.spawn,
            begin=self._begin_together,
            confirm_running=reporter.confirm_running,
            context=lambda: self.context,
            may_abandon=self._may_abandon,
        )
        self.streams = Streams(
            answering.replies, self._clock, pause=self._pause, resume=self._resume, is_gone=self._is_gone
        )
        self._on_alone = on_alone
        self._alone: InFlight | None = None
        self._evidence = DeathEvidence()
        self._reply_to_logged = False
        self.intakes = 0
        """How many queues are consumed now."""
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[int, InFlight] = {}
        self._accepted = 0
        self._idle = asyncio.Event()
        self._idle.set()
        reporter.watch(self.running_requests, self._evidence_fields)

    @property
    def context(self) -> Context:
        """The context of requests that begin now."""
        return self.data.context

    @property
    def in_flight(self) -> int:
        return len(self._jobs)

    @property
    def free_slots(self) -> int:
        """How many requests could begin to run now."""
        return self._slots.free

    @property
    def largest_batch(self) -> int:
        """The requests of its largest batch; 1 without batch handlers."""
        return self._dispatcher.largest_batch

    @property
    def runs_alone(self) -> bool:
        """Whether a suspect runs, or is about to: the worker must not take other requests meanwhile."""
        return self._alone is not None

    async def until_idle(self) -> None:
        """Wait until no request is in this worker."""
        await self._idle.wait()

    # -- the task of a request -----------------------------------------------------------------------------------------

    def accept(
        self,
        delivery: Delivery,
        *,
        priority: int,
        broker: BrokerConnection,
        level: PriorityLevel | None = None,
        held: HeldRequest | None = None,
        probe: str | None = None,
    ) -> None:
        """Take a delivery over; `priority` 0 is the highest. `probe`: the id of the probe for which it was taken.

        Never raises, whatever the delivery contains.
        """
        # From here to the acknowledgement the request is unacknowledged: if the worker dies, RabbitMQ requeues it.
        request = delivery.to_request(now_ms=now_ms(self._clock))
        if not self._retries.of_managed_pool:
            # No ingress has removed what the client wrote.
            request = replace(request, headers=without_identity(request.headers))
        self._accepted += 1
        job = InFlight(
            delivery=delivery,
            request=request,
            call=Call(self.context, request, clock=self._clock, max_bytes=self._replies.max_bytes),
            broker=broker,
            # Unique in the life of this worker: cancelling the Spark jobs of one group must not hit another request.
            group_id=f"{self.context.worker_id}-{self._accepted}",
            priority=priority,
            received_at=self._clock.monotonic(),
            level=level,
            held=held,
            probe=probe,
        )
        if level is not None:
            # Before the task runs: from now on no lower level may get a slot ahead of this request.
            level.arrived()
        if request.wants_progress:  # other clients take the first reply for the last one
            job.call.attach(partial(self._progress.send, job))
        self._jobs[self._accepted] = job
        self._idle.clear()
        # A task for each request: `accept` never waits, so that a slow request keeps no intake from reading the next
        # one.
        job.task = self._runtime.spawn(self._process(job, self._accepted))
        self._reporter.received()

    async def _process(self, job: InFlight, number: int) -> None:
        """Process one request until it is settled and its handler has ended."""
        # An interruption before this line sets only the flag: cancelling a task that has not begun would skip its
        # clean-up.
        job.started = True
        claimed = False
        try:
            result = await self._work(job)
            # The handler is over: a deadline that fires from here on must not interrupt the publish of the answer.
            job.disarm()
            # An interrupted request was settled by `_settle_interrupted`, unless its handler ended at once.
            if claimed := job.claim():
                await self._settle(job, result)
        except BrokerError as error:
            # Not settled: RabbitMQ still has the request and delivers it again. Nothing may answer it from here.
            self._drop(job, error)
        except Exception:
            log.exception("request could not be processed")
            # Returned as a failed delivery: a request on which this code fails each time must reach the delivery limit.
            if claimed or job.claim():
                await self._reject(job)
        finally:
            job.disarm()
            if job.settling is not None:
                # The entry stays until the interruption has settled the request: `until_idle` must not return before
                # that.
                await asyncio.wait({job.settling})
            if not job.is_reported:
                # Every `received` is balanced by one `completed` or `dropped`, or the worker would report that it is
                # never idle.
                self._reporter.dropped()
            del self._jobs[number]
            if job.data is not None:
                # After the handler has ended: nothing reads the former data any more once its last request is here.
                self.data.release(job.data)
            # Last of all: a lower level that waits for this queue checks it again from here.
            job.leave()
            if not self._jobs:
                self._idle.set()

    async def _work(self, job: InFlight) -> Result:
        """The result of a request: of the check, of its handler, or of an interruption."""
        try:
            early = self._check(job) or await self._count_events(job)
            if early is None and not job.is_suspect:
                early = await self._wait_for_data(job)
            if early is not None:
                return early
            result = await (self._run_alone(job) if job.is_suspect else self._run_in_slot(job))
        except asyncio.CancelledError:
            # `_interrupt` cancels this task. Any other cancellation is the end of the worker.
            task = asyncio.current_task()
            if job.interruption is None or task is None or task.uncancel() > 0:
                raise
        if job.interruption is not None:
            # The handler may have returned in the same moment. The interruption wins: it may have settled the request
            # already.
            return result_of(job.interruption)
        return self._with_data_version(job, result)

    # -- checks, before the request waits for a slot -------------------------------------------------------------------

    def _check(self, job: InFlight) -> Result | None:
        """The result of a request that must not run; None if it may. Arms the timer of its deadline."""
        request = job.request
        # Before the other checks: their answers, `expired` for example, would go to an address that is not allowed.
        reason = self._addresses.refuse(request.reply_to)
        # A request that is requeued or lost gets no answer from here. One that its caller has cancelled would get one.
        if reason is not None and job.interruption not in {Interruption.REQUEUED, Interruption.LOST}:
            self._log_reply_to(request, reason)
            return Outcome.REPLY_TO_REFUSED
        left = time_left(request, now_ms=now_ms(self._clock), settings=self._settings)
        # In a direct pool a client writes these headers itself, so that they prove no earlier attempt.
        retried = self._retries.of_managed_pool and read_attempts(request.headers) > 0
        # Taken even if the request ends for another reason: a cancel counts once, and never for a later request.
        was_cancelled = self._cancellations.take(request.correlation_id, request.reply_to, tried_before=retried)
        result = early_result(interruption=job.interruption, was_cancelled=was_cancelled, left=left)
        # Set before the text is checked: a suspect with a refused text is dead-lettered instead of answered.
        job.is_suspect = is_suspect(request)
        if result is None:
            result = self._check_text(job)
        # Armed while the request still waits for its slot: it must be answered `expired` at its deadline, not later.
        if result is None and left is not None:
            self._arm(job, left)
        return result

    def _log_reply_to(self, request: Request, reason: str) -> None:
        """Log a refused reply address once: the worker serves one key, and the controller counts such requests."""
        if not self._reply_to_logged:
            self._reply_to_logged = True
            address = header_text(request.reply_to or "", limit=MAX_ROUTE)
            log.warning("request dropped, reply address not allowed", reason=reason, reply_to=address)

    def _check_text(self, job: InFlight) -> Result | None:
        """The result of a request whose text is refused. A suspect is kept for inspection; others are answered."""
        seconds = self.refused_texts.seconds_left(job.request)
        if not seconds or (REPLAY_HEADER in job.request.headers and not job.is_suspect):
            return None  # an operator has replayed it
        log.warning("request refused, its text has ended workers", path=shown_path(job.request.path))
        # A suspect has ended a worker before: dead-lettering keeps it for inspection, and the controller answers it.
        return Outcome.DEAD_LETTERED if job.is_suspect else refusal(job.request, seconds)

    async def _count_events(self, job: InFlight) -> Result | None:
        """Count what the request takes from the budget of events; its result if that is too much."""
        try:
            job.events = await self.budget.count(job.request)
        except RequestError as error:
            return error_response(error, path=job.request.path)
        return None

    async def _wait_for_data(self, job: InFlight) -> Result | None:
        """Wait until the data is of the version that the request needs; its result if there is no such data.

        The worker may die during the reload: the request is unacknowledged and is delivered again, and the reports name
        it as running. Requests that need no later version go on.
        """
        try:
            required = required_data_version(job.request.headers)
        except InvalidMessageError as error:
            refusal = RequestError(error.message, 400, "invalid_data_version", {"header": DATA_VERSION_HEADER})
            return error_response(refusal, path=job.request.path)
        if self.data.has(required):
            return None
        try:
            await self.data.prepare(required, on_reload=lambda: self._let_others_pass(job))
            return None
        except RequestError as error:
            return error_response(error, path=job.request.path)
        except Exception as error:
            return await self._reload_failed(job, error)
        finally:
            job.waits_for_data = False

    def _let_others_pass(self, job: InFlight) -> None:
        """Let requests that need no later version run while this one waits for the reload."""
        # Bounded: each one lets a further request come, and those that wait must fit into the memory of the worker.
        if not job.is_suspect and sum(other.waits_for_data for other in self._jobs.values()) < MAX_WAITING_FOR_DATA:
            job.set_aside()
        job.waits_for_data = True

    # -- the slot, for one request or for several that run together ----------------------------------------------------

    async def _run_in_slot(self, job: InFlight) -> Result:
        """Wait for a slot, by priority, and run the handler in it."""
        batch = self._dispatcher.batch_options(job.request.path)
        job.classify(in_batch=batch is not None)
        if batch is not None:
            return await self._run_together(job, partial(self._batches.run, job, batch))
        if self._coalesces(job):
            return await self._run_together(job, partial(self._coalescing.run, job))
        # Cancelled while it waits here, the request has no slot to return; `acquire` passes on a slot granted
        # meanwhile.
        await self._slots.acquire(job.priority, events=job.events)
        # Set without an await after the grant, so that an interruption never leaves a slot that belongs to no request.
        job.has_slot = True
        job.begin()
        try:
            return await self._run_handler(job)
        finally:
            job.in_handler = False
            self._free_slot(job)

    def _coalesces(self, job: InFlight) -> bool:
        """Whether identical requests share one run of the handler: as the handler says, else as the route says."""
        if read_wanted_credit(job.request.headers) is not None:
            return False  # each client of a stream has its own credit
        said = self._dispatcher.coalesces(job.call)
        if said is not None:
            return said
        # In a direct pool a client writes this header itself.
        return self._retries.of_managed_pool and job.request.headers.get(COALESCE_HEADER) is True

    async def _run_together(self, job: InFlight, run: Callable[[], Awaitable[Response]]) -> Result:
        """Run the request together with others, in one slot for all of them."""
        try:
            if await self._is_abandoned(job):
                # Before it joins the others: an abandoned request would take a place from one whose caller still waits.
                return Outcome.ABANDONED
            try:
                return await run()
            except DataChangedError as error:
                # Each of the requests comes here; they share the reload, and run together again.
                job.in_handler = False
                refused = await self._reload_changed(job, error)
                if refused is not None:
                    return refused
            try:
                return await run()
            except DataChangedError as error:
                return error_response(error, path=job.request.path)
        except SessionLostError as error:
            return self._session_lost(job, error)
        finally:
            job.in_handler = False

    def _begin_together(self, job: InFlight, group_id: str, size: int) -> None:
        """The batch of the request, or the run that it shares, has its slot."""
        job.begin()
        # Here and not with the slot: only now it is known which requests run.
        self.budget.take(job.events)
        job.events = 0  # it may run again, when data has changed
        job.phase = Phase.RUNNING
        job.in_handler = True
        # All requests of a batch share one Spark job group: the handler answers them together.
        job.group_id, job.batch_size = group_id, size
        self._use_data(job)
        left = time_left(job.request, now_ms=now_ms(self._clock), settings=self._settings)
        self._arm(job, time_to_work(left, self._settings))

    def _free_slot(self, job: InFlight) -> None:
        if job.has_slot:
            job.has_slot = False
            self._slots.release()

    # -- suspects ------------------------------------------------------------------------------------------------------

    async def _run_alone(self, job: InFlight) -> Result:
        """Run a suspect after all other requests, and with no other request in this worker.

        RabbitMQ has the report that the suspect is here before others may run: if the worker dies now, the controller
        does not count the death as unexplained. It has the report that the suspect runs alone before the suspect
        runs. After a death in between, the request remains a suspect; RabbitMQ's delivery limit counts in any case.
        """
        await self._reporter.confirm_running()
        # From here others may go first, also those that arrive later; the prefetch lets one more request come in its
        # place.
        job.set_aside()
        if job.request.delivery_count >= 2:
            # The controller needs this time to notice the death of the last worker and to send the text that it
            # refuses.
            await self._clock.sleep(VERDICT_TIME)
        # All slots: nothing else may run beside the suspect, or its death would prove nothing about it.
        await self._slots.acquire_all(SUSPECT_PRIORITY, patience=PATIENCE, events=job.events)
        try:
            job.phase = Phase.RUNNING
            # Set before the callback: it makes the intakes stop, so that no further request enters the worker.
            self._alone = job
            self._on_alone()
            await self._until_alone()
            async with self._suspect_gate.one_at_a_time():
                return await self._run_suspect(job)
        finally:
            job.in_handler = False
            self._alone = None
            # Cleared before the slots are released: the next request that ends the worker is not this one.
            self._evidence.alone = ""
            # Before the intakes consume again, so that the first request that arrives finds its slot free.
            self._slots.release(all_slots=True)
            self._on_alone()
            # The suspect is not the cause of what happens from now on.
            self._reporter.report(Event.BUSY, in_flight=self._reporter.in_flight)

    async def _until_alone(self) -> None:
        """Wait until other requests that were set aside are requeued, and no queue is consumed."""
        until = self._clock.monotonic() + ALONE_TIMEOUT
        # Polled, with a limit: a request whose handler never ends must not hold the suspect back without end.
        while (len(self._jobs) > 1 or self.intakes) and self._clock.monotonic() < until:
            await self._clock.sleep(0.01)

    async def _run_suspect(self, job: InFlight) -> Result:
        refused = self._check_text(job)  # the controller may have refused its text meanwhile
        if refused is not None:
            return refused
        # Not earlier: a worker that dies before this line must not be taken as proof against the suspect.
        self._evidence.alone = text_fingerprint(job.request.path, job.request.body)
        try:
            # Here and not before: the reload that it needs may be what ended the earlier worker.
            early = await self._wait_for_data(job)
            return await self._run_handler(job) if early is None else early
        finally:
            # Before the gate opens: the suspect of another worker of this process runs next.
            job.in_handler = False
            self._evidence.alone = ""

    # -- the handler ---------------------------------------------------------------------------------------------------

    async def _run_handler(self, job: InFlight) -> Result:
        try:
            job.phase = Phase.RUNNING
            job.in_handler = True
            # Computed anew: the request may have waited for its slot, and the handler gets only what is left.
            left = time_left(job.request, now_ms=now_ms(self._clock), settings=self._settings)
            self._arm(job, time_to_work(left, self._settings))
            # As late as possible: the caller may have gone while the request waited.
            if await self._is_abandoned(job):
                return Outcome.ABANDONED
            if job.request.redelivered:  # it may have ended an earlier worker
                await self._reporter.confirm_running()
            if await self.streams.is_wanted(job.request):
                job.call.attach_stream(self._replies.max_bytes)
            self._use_data(job)
            try:
                return await self._dispatch(job)
            except DataChangedError as error:
                return await self._run_again(job, error)
        except SessionLostError as error:
            return self._session_lost(job, error)

    async def _is_abandoned(self, job: InFlight) -> bool:
        """Whether the caller is gone, as far as RabbitMQ knows: only for direct reply-to, and if so configured."""
        reply_to = job.request.reply_to
        if not self._settings.skip_abandoned or reply_to is None or not reply_to.startswith(DIRECT_REPLY_TO):
            return False
        # A passive declare of the address; a mandatory reply would not tell (broker: replies-are-never-mandatory).
        return await job.broker.caller_is_gone(reply_to)

    async def _dispatch(self, job: InFlight) -> Result:
        """Run the handler, and send the parts of a streamed answer; the final reply. Raises as `Dispatcher.run`."""
        result = await self._dispatcher.run(job.call, group_id=job.group_id)
        return result if isinstance(result, Response) else await self._send_stream(job, result)

    async def _run_again(self, job: InFlight, changed: DataChangedError) -> Result:
        """Reload the data and run the handler once more. The request is unacknowledged all the while."""
        refused = await self._reload_changed(job, changed)
        if refused is not None:
            return refused
        self._use_data(job)
        try:
            return await self._dispatch(job)
        except DataChangedError as error:
            return error_response(error, path=job.request.path)

    async def _reload_changed(self, job: InFlight, changed: DataChangedError) -> Result | None:
        """Reload data that has changed below a handler; the result of the request if that fails."""
        log.warning("data changed, reloading", path=shown_path(job.request.path), reason=changed.message)
        try:
            # Not if another request has had the data reloaded since this one began.
            await self.data.reload(unless=job.data)
        except RequestError as error:
            return error_response(error, path=job.request.path)
        except Exception as error:
            return await self._reload_failed(job, error)
        job.data_reloaded = True
        # The jobs of the first run have ended, and tasks of ended groups are taken for strays.
        job.group_id = f"{job.group_id}-again"
        return None

    async def _reload_failed(self, job: InFlight, error: Exception) -> Result:
        try:
            return await self._dispatcher.reload_failed(error, job.call)
        except SessionLostError as lost:
            return self._session_lost(job, lost)

    def _session_lost(self, job: InFlight, error: SessionLostError) -> Result:
        # Recorded before the exit is requested: the last report has to name the requests that ran when the session
        # ended.
        self._evidence.lost_session.append(job.fingerprint)
        if self._alone is job:
            self._evidence.lost_session_alone = self._evidence.alone
        # No request can run here any more. The controller starts another worker, which builds a new session.
        self._runtime.request_exit(Unrecoverable(error.message))
        return Outcome.REJECTED

    def _use_data(self, job: InFlight) -> None:
        """Use the current data for the handler that begins: it is not older than what the request waited for."""
        job.data, former = self.data.use(), job.data
        job.call.context = job.data.context
        if former is not None:
            self.data.release(former)

    def _with_data_version(self, job: InFlight, result: Result) -> Result:
        if not isinstance(result, Response) or job.data is None:
            return result
        headers = dict(result.headers)
        # A handler that answers with rows of an earlier time names their version; None: it is unknown.
        version = headers.pop(DATA_VERSION_HEADER, job.data.version)
        if version is not None:
            headers[DATA_VERSION_HEADER] = version
        if job.data_reloaded:
            headers[DATA_RELOADED_HEADER] = True
        return replace(result, headers=headers)

    # -- streamed answers ----------------------------------------------------------------------------------------------

    async def _send_stream(self, job: InFlight, parts: ArrowStream) -> Result:
        """Send the parts of a streamed answer; its final reply. Raises as `Dispatcher.run` does, and `BrokerError`."""
        call, group_id = job.call, job.group_id
        try:
            response = await self.streams.send(job, lambda: self._dispatcher.next_part(parts, call, group_id=group_id))
        except PublishRefusedError as error:
            # As for a final reply whose queue is full: the delivery counts, so that this ends at the delivery limit.
            log.warning("part of a stream refused by its queue", path=job.request.path, reason=str(error))
            return Outcome.REJECTED
        finally:
            await self._dispatcher.close_stream(parts, call, group_id=group_id)
        if response is None:
            log.info("stream ended, its client is gone", path=shown_path(job.request.path))
            return Outcome.ABANDONED
        return response

    def _pause(self, job: InFlight) -> bool:
        """Give the slot of a stream without credit back; False if it keeps its slot."""
        paused = sum(other.paused for other in self._jobs.values())
        # A suspect has no slot of its own: it holds all of them, and must go on to run alone.
        if not job.has_slot or paused >= MAX_PAUSED:
            return False
        job.paused = True
        # The prefetch lets one more request come, which gets this slot.
        job.set_aside()
        self._free_slot(job)
        return True

    async def _resume(self, job: InFlight) -> None:
        """Wait for a slot again."""
        await self._slots.acquire_again(job.priority)
        # Without an await after the grant, as in `_run_in_slot`.
        job.has_slot, job.paused = True, False
        job.begin()

    async def _is_gone(self, job: InFlight) -> bool:
        """Whether the client of a stream is gone, as far as RabbitMQ knows; only for direct reply-to."""
        reply_to = job.request.reply_to or ""
        return reply_to.startswith(DIRECT_REPLY_TO) and await job.broker.caller_is_gone(reply_to)

    # -- the outcome ---------------------------------------------------------------------------------------------------

    async def _settle(self, job: InFlight, result: Result) -> None:
        """Reply and acknowledge, or return the request to RabbitMQ. For the task that has claimed the request."""
        # Returns after the confirm of the reply or of the copy. Until then the request stays unacknowledged.
        outcome = await self._answer(job, result) if isinstance(result, Response) else result
        match outcome:
            case Outcome.ANSWERED:
                # Crash before: the request is delivered again, and its caller gets two answers. After: it is gone,
                # answered.
                await job.ack()
                assert isinstance(result, Response)
                self._completed(job, str(result.status), code=result.code)
            case Outcome.RETRIED:
                # Crash before: the copy waits and the request is delivered again, a duplicate. After: the copy alone.
                await job.ack()
                self._report(job, RETRIED)
            case Outcome.ABANDONED:
                # No caller is left to answer: a crash before it only repeats the check.
                await job.ack()
                self._completed(job, "abandoned")
            case Outcome.REPLY_TO_REFUSED:
                # Acknowledged and not rejected: the request must neither be answered nor run on a later delivery.
                await job.ack()
                self._report(job, REPLY_TO_REFUSED)
            case Outcome.REQUEUED:
                # RabbitMQ 4.3 does not count a nack as a failed delivery; 3.10 and 4.0 do (broker:
                # count-failures-by-reject).
                await job.nack()
            case Outcome.REJECTED:
                # The delivery counts, so that a request that always fails here ends as poison and not in a circle.
                await job.reject()
            case Outcome.DEAD_LETTERED:
                # One step of RabbitMQ: at no moment is the request neither in this queue nor among the dead letters.
                await job.reject(requeue=False)
            case Outcome.LOST:
                # Its channel is closed: a frame on it would close the whole connection (broker: channel-ends).
                pass

    async def _answer(self, job: InFlight, response: Response) -> Outcome:
        """Publish the retry of a failed request, or its reply. Returns when RabbitMQ has confirmed it."""
        if job.progress:  # the answer must be the last reply
            await asyncio.wait(job.progress)
        # Decided here, after the handler: only now is the status code known that the route's terms name.
        retry = self._retries.plan(job.request, response, now_ms=now_ms(self._clock))
        if retry is not None:
            # Before the publish: a cancel that arrives meanwhile is meant for the next attempt, and is remembered for
            # it.
            job.will_be_retried = True
            if await self._retries.send(job.broker, job.delivery, job.request, retry):
                return Outcome.RETRIED
            job.will_be_retried = False
        try:
            # Over the connection that delivered the request, or one opened beside it: once the former is lost, the
            # request is delivered again anyway.
            await self._replies.send(job.broker.replies, job.request, counted(job.request, response))
        except PublishRefusedError as error:
            # The reply queue is full. Run again, its reply may fit; the delivery limit ends a request whose caller
            # never reads.
            log.warning("reply refused by its queue", path=job.request.path, reason=str(error))
            return Outcome.REJECTED
        return Outcome.ANSWERED

    async def _reject(self, job: InFlight) -> None:
        try:
            await job.reject()
        except BrokerError as error:
            self._drop(job, error)

    def _drop(self, job: InFlight, error: BrokerError) -> None:
        """Give up a request whose connection failed. RabbitMQ requeues it once it notices that: make it notice soon."""
        log.warning("request dropped, RabbitMQ delivers it again", path=job.request.path, reason=error.message)
        # The channel is still open although a part of the connection failed: RabbitMQ requeues nothing until it closes.
        if not job.delivery.channel.is_closed:
            job.broker.fail()

    def _completed(self, job: InFlight, status: str, *, code: int | None = None) -> None:
        # A cancel that comes after the answer must not be remembered: it would hit a later request of the same name.
        self._cancellations.completed(job.request.correlation_id, job.request.reply_to)
        self._report(job, status, code=code)

    def _report(self, job: InFlight, status: str, *, code: int | None = None) -> None:
        # Set first: whatever fails below, the count of requests in flight must not be lowered twice.
        job.is_reported = True
        completion = Completion(
            status,
            # Other paths are arbitrary text of callers, who could make reports many and long.
            job.request.path if self._dispatcher.knows(job.request.path) else "",
            job.request.redelivered,
            route=self._route_of(job.request),
            priority=priority_of_delivery(job.delivery),
            code=code,
            probe=job.probe,
        )
        duration = self._clock.monotonic() - job.received_at
        # Only the circuits of managed pools count requests by their id.
        request = job.fingerprint if self._retries.of_managed_pool else None
        self._reporter.completed(completion, duration_ms=int(duration * 1000), request=request)

    def _route_of(self, request: Request) -> str | None:
        """The route that the ingress has written; None in a direct pool, where callers write the header."""
        route = decode_text(request.headers.get(ROUTE_HEADER)) if self._retries.of_managed_pool else None
        return None if route is None else header_text(route, limit=MAX_ROUTE)

    # -- interruptions -------------------------------------------------------------------------------------------------

    def cancel(self, correlation_id: str | None, reply_to: str | None, *, keep_for: float = 0.0) -> None:
        """Cancel a request for its caller. One that has not arrived yet is answered `cancelled` when it does; it may
        wait for another attempt for `keep_for` seconds."""
        for job in self._jobs.values():
            if job.settling is not None and job.settling.done():
                continue  # only its handler still runs; a later request may have the same correlation id
            if job.interruption in {Interruption.REQUEUED, Interruption.LOST}:
                continue  # it is returning to its queue: the cancel is for its next delivery
            if (job.request.correlation_id, job.request.reply_to) == (correlation_id, reply_to):
                self._interrupt(job, Interruption.CANCELLED)
                if not job.will_be_retried:
                    return
        # Not here, or here and about to wait for its next attempt: the cancel may have overtaken the request.
        self._cancellations.remember(correlation_id, reply_to, keep_for=keep_for)

    def requeue(self, *, channel: Channel | None = None, also_running: bool = False) -> None:
        """Requeue the requests that wait, or all of them; with `channel`, only those that arrived through it."""
        for job in list(self._jobs.values()):
            # A channel that is being closed returns only its own requests; those of other queues stay.
            if channel is not None and job.delivery.channel is not channel:
                continue
            if also_running or job.phase is Phase.WAITING:
                self._interrupt(job, Interruption.REQUEUED)

    def lose(self, channel: Channel) -> None:
        """Stop the work on the requests of a closed channel: RabbitMQ has requeued them."""
        for job in list(self._jobs.values()):
            if job.delivery.channel is channel:
                # Never settled from here: another worker may have the request by now, and its answer is the one that
                # counts.
                self._interrupt(job, Interruption.LOST)

    def _arm(self, job: InFlight, seconds: float) -> None:
        """Set the deadline of a request to `seconds` from now."""
        job.disarm()
        # The handler sees the same limit as the timer, so that it can stop by itself before it is interrupted.
        job.call.set_timeout(seconds)
        job.timer = self._loop.call_later(seconds, self._expire, job)

    def _expire(self, job: InFlight) -> None:
        if not self._interrupt(job, Interruption.EXPIRED):
            self._watch_stuck(job)  # its channel was lost before; its handler must end as well

    def _interrupt(self, job: InFlight, reason: Interruption) -> bool:
        """Stop the work on a request, and settle it now: its handler may run on for a while, or never end."""
        if not job.interrupt(reason):
            return False
        # A lost request keeps its timer: its deadline is then also the limit for its handler to end.
        if reason is not Interruption.LOST:
            self._watch_stuck(job)
        if job.in_handler:
            # In a task of its own: the answer must not wait for a handler that may run on for minutes.
            job.settling = self._runtime.spawn(self._settle_interrupted(job, reason))
            # Frees the slot, so that the next request need not wait for a handler that runs on.
            self._abandon(job)
        return True

    async def _settle_interrupted(self, job: InFlight, reason: Interruption) -> None:
        if not job.claim():
            return  # its handler ended at once, and `_process` settles it
        try:
            await self._settle(job, result_of(reason))
        except BrokerError as error:
            self._drop(job, error)
        except Exception:
            log.exception("interrupted request could not be settled")
            await self._reject(job)

    def _abandon(self, job: InFlight) -> None:
        """Free the slot of an interrupted handler while it runs on, if its application allows that."""
        if job.has_slot and self._may_abandon(job):
            self._free_slot(job)

    def _may_abandon(self, job: InFlight) -> bool:
        """Whether the slot of an interrupted request is free while its handler runs on; counts it then."""
        # Handlers that run on without a slot still hold a thread; the pool of threads has `max_abandoned` spare ones.
        abandoned = sum(other.is_abandoned and other.in_handler for other in self._jobs.values())
        if self._dispatcher.may_abandon(job.request.path) and abandoned < self._settings.max_abandoned:
            job.is_abandoned = True
        return job.is_abandoned

    def _watch_stuck(self, job: InFlight) -> None:
        job.disarm()
        # The same timer slot as the deadline: an interrupted request has no deadline any more.
        job.timer = self._loop.call_later(self._settings.stuck_grace, self._stuck, job)

    def _stuck(self, job: InFlight) -> None:
        """Exit because a handler runs on after its cancel. Its request is settled already."""
        if job.interruption is None or not job.in_handler:
            return
        log.error("handler does not end", path=job.request.path, reason=str(job.interruption))
        # Further handlers may be stuck because of the first one; of a batch, any other request may be the cause.
        if not self._evidence.stuck and job.batch_size <= 1:
            # Named in the last report: the controller refuses the text once it has ended a second worker this way.
            self._evidence.stuck = text_fingerprint(job.request.path, job.request.body)
        reason = f"The handler of {job.request.path!r} did not end when it was cancelled."
        # A thread cannot be ended from outside in Python: only the end of the process frees what it holds.
        self._runtime.request_exit(Unrecoverable(reason))

    # -- reports -------------------------------------------------------------------------------------------------------

    def running_requests(self) -> list[str]:
        """Fingerprints of the requests whose handlers run now, settled or not, or ran when the session was lost."""
        # A reload is work for the requests that wait for it: it may end the worker as a handler may.
        running = [job.fingerprint for job in self._jobs.values() if job.in_handler or job.waits_for_data]
        # Bounded: the report must stay small however many requests run. Lost sessions come first, as the likely cause.
        return [*self._evidence.lost_session, *running][:MAX_NAMED_REQUESTS]

    def _evidence_fields(self) -> Mapping[str, object]:
        return self._evidence.fields(suspects=sum(job.is_suspect for job in self._jobs.values()))

    async def progress(self) -> Mapping[str, int]:
        """The progress of the running requests in the session; empty if unknown."""
        running = list({job.group_id for job in self._jobs.values() if job.in_handler})
        try:
            return await self._dispatcher.progress(self.context.session, running) if running else {}
        except Exception:
            log.warning("session progress unknown", exc_info=True)
            return {}
