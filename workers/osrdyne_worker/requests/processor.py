"""The path of a request through the worker: check it, run its handler, reply with a confirm, acknowledge it.

Intakes pass deliveries to `Processor.accept`, which starts one task for each. The deadline, the caller's cancel, a
pause and a lost channel interrupt that task. Source: docs/reference/protocol/workers.md.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from osrdyne.aio.clock import now_ms
from osrdyne.amqp import Channel, Delivery
from osrdyne.amqp.direct_reply_to import DIRECT_REPLY_TO
from osrdyne.errors import BrokerAccessError, BrokerError, InvalidMessageError, OsrdyneError, PublishRefusedError
from osrdyne.logs import get_logger
from osrdyne.protocol.activity import (
    FULL_QUEUE,
    MAX_NAMED_REQUESTS,
    NO_PERMISSION,
    REPLY_TO_REFUSED,
    RETRIED,
    WAITING_ANSWERS_FIELD,
    WAITING_FIELD,
    Event,
    text_fingerprint,
)
from osrdyne.protocol.data_versions import DATA_RELOADED_HEADER, DATA_VERSION_HEADER, required_data_version
from osrdyne.protocol.messages import (
    COALESCE_HEADER,
    REPLAY_HEADER,
    ROUTE_HEADER,
    Request,
    Response,
    header_text,
    names_identity,
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
from osrdyne_worker.requests.controller_clock import ControllerClock
from osrdyne_worker.requests.data_versions import DataLoading, DataVersions
from osrdyne_worker.requests.dispatch import Dispatcher, SessionLostError
from osrdyne_worker.requests.inflight import InFlight, Interruption, Phase
from osrdyne_worker.requests.job_progress import JobProgressSender
from osrdyne_worker.requests.outcome import Outcome, Result, early_result, result_of, time_left, time_to_work
from osrdyne_worker.requests.replies import ProgressSender, ReplySender
from osrdyne_worker.requests.retries import Retries, priority_of_delivery, with_attempts
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
"""Requests that may wait for a reload without counting towards the prefetch."""

MAX_WAITING_TO_ANSWER = 20
"""Requests whose answers may wait for room in a reply queue without counting towards the prefetch."""

MAX_TEXT = 200
"""Characters of a client's text in a report or a log event."""

log = get_logger("worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """The collaborators that end a request: allowed reply addresses, the sender of replies, and the retries."""

    addresses: ReplyAddresses
    replies: ReplySender
    retries: Retries


class Processor:
    """Processes requests, at most `concurrency` at once.

    The methods are in the order in which a request passes them: `accept`, `_process`, `_work`, `_check`,
    `_count_events`, `_wait_for_data`, `_run_in_slot` (a suspect: `_run_alone`), `_run_handler`, `_settle`, `_answer`,
    `_report`. `_interrupt` stops a request at any step.
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
        """`on_alone` is called when `runs_alone` changes. `loading` reloads the data; None: the data never changes.
        `suspect_gate`: that of the process, if several workers share it. `rate`: limit of events; None: no limit."""
        self.data = DataVersions(context, loading, runtime)
        self._runtime = runtime
        self._settings = runtime.settings
        self._clock = runtime.clock
        self._allowed_skew_ms = int(self._settings.max_clock_skew * 1000)
        self._controller_clock = ControllerClock(self._clock, largest_skew=self._settings.max_clock_skew)
        self._dispatcher = dispatcher
        self._reporter = reporter
        self._replies = answering.replies
        self._progress = ProgressSender(answering.replies, runtime.spawn)
        self._job_progress = JobProgressSender(
            dispatcher,
            self._progress,
            self._clock,
            runtime.spawn,
            session=lambda: self.context.session,
            jobs=lambda: list(self._jobs.values()),
        )
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
            self._clock,
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
        """The number of queues that are consumed now."""
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
        """The number of further requests that could run now."""
        return self._slots.free

    @property
    def largest_batch(self) -> int:
        """The largest `max_size` of the batch handlers; 1 without any."""
        return self._dispatcher.largest_batch

    @property
    def runs_alone(self) -> bool:
        """Whether a suspect runs alone, or is about to: the worker must take no other requests meanwhile."""
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
        """Start to process a delivery. `priority`: 0 is the highest. `probe`: the id of the probe for which it was
        taken. Never raises, whatever the delivery contains.
        """
        # From here to the acknowledgement the request is unacknowledged: if the worker dies, RabbitMQ requeues it.
        skew_ms = self._allowed_skew_ms
        if self._retries.of_managed_pool:  # only the controller publishes to its queues
            skew_ms = self._controller_clock.skew_of(delivery)
        request = delivery.to_request(now_ms=now_ms(self._clock), skew_ms=skew_ms)
        if not self._retries.of_managed_pool and names_identity(request.headers):
            # No ingress has removed the header, so a client may have written it.
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
        if request.wants_progress:  # any other client would take progress for the final reply
            job.call.attach(partial(self._progress.send, job))
        self._jobs[self._accepted] = job
        if request.wants_job_progress:
            self._job_progress.watch()
        self._idle.clear()
        # A task for each request: `accept` never waits, so a slow request does not delay the consumer of its queue.
        job.task = self._runtime.spawn(self._process(job, self._accepted))
        self._reporter.received()

    async def _process(self, job: InFlight, number: int) -> None:
        """Process a request until it is settled and its handler has ended."""
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
            # Not settled: RabbitMQ delivers the request again, so this worker must not answer it.
            self._drop(job, error)
        except Exception:
            log.exception("request could not be processed")
            # Returned as a failed delivery: a request on which this code fails each time must reach the delivery limit.
            if claimed or job.claim():
                await self._reject(job)
        finally:
            job.disarm()
            if job.settling is not None:
                # `until_idle` must not return before the interruption has settled the request.
                await asyncio.wait({job.settling})
            if not job.is_reported:
                # Every `received` needs one `completed` or `dropped`: otherwise the worker would never report idle.
                self._reporter.dropped()
            del self._jobs[number]
            if job.data is not None:
                # After the handler has ended: the release of the last request unloads former data.
                self.data.release(job.data)
            # Last: a lower level that waits for this queue checks the queue again from here.
            job.leave()
            if not self._jobs:
                self._idle.set()

    async def _work(self, job: InFlight) -> Result:
        """Return the result of a request: of its checks, its handler or an interruption."""
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
            # Also if the handler has returned at the same moment: the interruption may have settled the request.
            return result_of(job.interruption)
        return self._with_data_version(job, result)

    # -- checks, before the request waits for a slot -------------------------------------------------------------------

    def _check(self, job: InFlight) -> Result | None:
        """Return the result of a request that must not run; None if it may. Arms the timer of its deadline."""
        request = job.request
        # Before the other checks: their answers, `expired` for example, would go to an address that is not allowed.
        reason = self._addresses.refuse(request.reply_to)
        # A request that is requeued or lost gets no answer here; one that its caller has cancelled would get one.
        if reason is not None and job.interruption not in {Interruption.REQUEUED, Interruption.LOST}:
            self._log_reply_to(request, reason)
            return Outcome.REPLY_TO_REFUSED
        left = time_left(request, now_ms=now_ms(self._clock))
        # In a direct pool a client may write these headers, so they prove no earlier attempt.
        retried = self._retries.of_managed_pool and read_attempts(request.headers) > 0
        # Removed even if the request ends for another reason: a cancel must not hit a later request.
        was_cancelled = self._cancellations.take(request.correlation_id, request.reply_to, tried_before=retried)
        result = early_result(interruption=job.interruption, was_cancelled=was_cancelled, left=left)
        # Set before the text is checked: a suspect with a refused text is dead-lettered instead of answered.
        job.is_suspect = is_suspect(request)
        if result is None:
            result = self._check_text(job)
        # Before the wait for a slot: the request must be answered `expired` at its deadline, not later.
        if result is None and left is not None:
            self._arm(job, left)
        return result

    def _log_reply_to(self, request: Request, reason: str) -> None:
        """Log the first refused reply address only: the controller counts all such requests from the reports."""
        if not self._reply_to_logged:
            self._reply_to_logged = True
            address = header_text(request.reply_to or "", limit=MAX_TEXT)
            log.warning("request dropped, reply address not allowed", reason=reason, reply_to=address)

    def _check_text(self, job: InFlight) -> Result | None:
        """Return the result of a request whose text is refused; None if it is not."""
        seconds = self.refused_texts.seconds_left(job.request)
        if not seconds or (REPLAY_HEADER in job.request.headers and not job.is_suspect):
            return None  # an operator has replayed it from the poison inventory
        log.warning("request refused, its text has ended workers", path=shown_path(job.request.path))
        # A suspect has ended a worker before: the controller answers the dead letter and stores it for inspection.
        return Outcome.DEAD_LETTERED if job.is_suspect else refusal(job.request, seconds)

    async def _count_events(self, job: InFlight) -> Result | None:
        """Count the events of the request; return its result if they exceed the limit for one request."""
        try:
            job.events = await self.budget.count(job.request)
        except RequestError as error:
            return error_response(error, path=job.request.path)
        return None

    async def _wait_for_data(self, job: InFlight) -> Result | None:
        """Wait until the data has the version that the request needs; return its result if that fails.

        If the worker dies during the reload, RabbitMQ delivers the request again, and the reports name it as running.
        """
        try:
            required = required_data_version(job.request.headers)
        except InvalidMessageError as error:
            invalid = RequestError(error.message, 400, "invalid_data_version", {"header": DATA_VERSION_HEADER})
            return error_response(invalid, path=job.request.path)
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
        # Bounded: for each of them RabbitMQ delivers a further request, and the waiting ones must fit into memory.
        if not job.is_suspect and sum(other.waits_for_data for other in self._jobs.values()) < MAX_WAITING_FOR_DATA:
            job.set_aside()
        job.waits_for_data = True

    # -- the slot, for one request or for several that run together ----------------------------------------------------

    async def _run_in_slot(self, job: InFlight) -> Result:
        """Wait for a slot, in the order of priorities, and run the handler in it."""
        batch = self._dispatcher.batch_options(job.request.path)
        job.classify(in_batch=batch is not None)
        if batch is not None:
            return await self._run_together(job, partial(self._batches.run, job, batch))
        if self._coalesces(job):
            return await self._run_together(job, partial(self._coalescing.run, job))
        # If the request is cancelled while it waits, `acquire` passes on a slot that was granted meanwhile.
        await self._slots.acquire(job.priority, events=job.events)
        # No await between the grant and this line: an interruption there would leak the slot.
        job.has_slot = True
        job.begin()
        try:
            return await self._run_handler(job)
        finally:
            job.in_handler = False
            self._free_slot(job)

    def _coalesces(self, job: InFlight) -> bool:
        """Whether the request shares a run with identical requests: by its handler's option, else by its route's."""
        if read_wanted_credit(job.request.headers) is not None:
            return False  # each client of a stream has its own credit
        by_handler = self._dispatcher.coalesces(job.call)
        if by_handler is not None:
            return by_handler
        # In a direct pool a client may write this header.
        return self._retries.of_managed_pool and job.request.headers.get(COALESCE_HEADER) is True

    async def _run_together(self, job: InFlight, run: Callable[[], Awaitable[Response]]) -> Result:
        """Run the request in a batch or a shared run, which has one slot for all of its requests."""
        try:
            if await self._is_abandoned(job):
                # Before it joins: an abandoned request would take a place in the batch from another request.
                return Outcome.ABANDONED
            try:
                return await run()
            except DataChangedError as error:
                # Each request of the batch or run gets this error; they share one reload, and run together again.
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
        """Mark the request as running: its batch, or the run that it shares, has its slot."""
        job.begin()
        # Not when the slot is acquired: which requests run is known only now.
        self.budget.take(job.events)
        job.events = 0  # taken once, although the request may run again on changed data
        job.phase = Phase.RUNNING
        job.in_handler = True
        # One Spark job group for all of them: a cancel of the batch or run must find its jobs.
        job.group_id, job.batch_size = group_id, size
        self._use_data(job)
        left = time_left(job.request, now_ms=now_ms(self._clock))
        self._arm(job, time_to_work(left, self._settings))

    def _free_slot(self, job: InFlight) -> None:
        if job.has_slot:
            job.has_slot = False
            self._slots.release()

    # -- suspects ------------------------------------------------------------------------------------------------------

    async def _run_alone(self, job: InFlight) -> Result:
        """Run a suspect after all other requests, and with no other request in this worker.

        Two reports make the death of the worker explainable. RabbitMQ has the first one, that the suspect is here,
        before other requests may run; and the second one, that the suspect runs alone, before the suspect runs. After a
        death in between, the request remains a suspect. RabbitMQ's delivery limit applies in any case.
        """
        await self._reporter.confirm_running()
        # From here other requests run first, also those that arrive later; RabbitMQ may deliver one in its place.
        job.set_aside()
        if job.request.delivery_count >= 2:
            # In this time the controller notices the death of the last worker, and sends the text that it refuses.
            await self._clock.sleep(VERDICT_TIME)
        # All slots: if other requests ran beside the suspect, the death of the worker would prove nothing.
        await self._slots.acquire_all(SUSPECT_PRIORITY, patience=PATIENCE, events=job.events)
        try:
            job.phase = Phase.RUNNING
            # Before the callback, which stops the intakes: no further request may enter the worker.
            self._alone = job
            self._on_alone()
            await self._until_alone()
            async with self._suspect_gate.one_at_a_time():
                return await self._run_suspect(job)
        finally:
            self._alone = None
            # Before the intakes consume again, so that the first request that arrives finds its slot free.
            self._slots.release(all_slots=True)
            self._on_alone()
            # This report no longer names the suspect: it is not the cause of a death from now on.
            self._reporter.report(Event.BUSY, in_flight=self._reporter.in_flight)

    async def _until_alone(self) -> None:
        """Wait until no queue is consumed and no other request runs; `ALONE_TIMEOUT` at most. Others may wait in the
        worker if RabbitMQ would count their return."""
        until = self._clock.monotonic() + ALONE_TIMEOUT
        # With a limit, because a handler that never ends keeps its request in the worker.
        while (self._has_others() or self.intakes) and self._clock.monotonic() < until:
            await self._clock.sleep(0.01)

    def _has_others(self) -> bool:
        return any(
            job is not self._alone and (job.phase is not Phase.WAITING or not job.broker.counts_returns)
            for job in self._jobs.values()
        )

    async def _run_suspect(self, job: InFlight) -> Result:
        refused = self._check_text(job)  # again: the controller may have refused its text meanwhile
        if refused is not None:
            return refused
        # Not earlier: a death of the worker before this line must not count as proof against the suspect.
        self._evidence.alone = text_fingerprint(job.request.path, job.request.body)
        try:
            # Alone as well: the reload that the suspect needs may have ended the earlier worker.
            early = await self._wait_for_data(job)
            return await self._run_handler(job) if early is None else early
        finally:
            # Before the gate opens: then the suspect of another worker of this process runs.
            job.in_handler = False
            self._evidence.alone = ""

    # -- the handler ---------------------------------------------------------------------------------------------------

    async def _run_handler(self, job: InFlight) -> Result:
        try:
            job.phase = Phase.RUNNING
            job.in_handler = True
            # Computed again: the request may have waited for its slot since `_check`.
            left = time_left(job.request, now_ms=now_ms(self._clock))
            self._arm(job, time_to_work(left, self._settings))
            # As late as possible: the caller may have disconnected while the request waited.
            if await self._is_abandoned(job):
                return Outcome.ABANDONED
            if job.request.redelivered or job.is_suspect:  # it may have ended an earlier worker
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
        """Whether the request must not run because its caller has disconnected (`skip_abandoned`)."""
        return self._settings.skip_abandoned and await self._is_gone(job)

    async def _dispatch(self, job: InFlight) -> Result:
        """Run the handler, send the parts of a streamed answer, and return the final reply. Raises as
        `Dispatcher.run`."""
        result = await self._dispatcher.run(job.call, group_id=job.group_id)
        return result if isinstance(result, Response) else await self._send_stream(job, result)

    async def _run_again(self, job: InFlight, changed: DataChangedError) -> Result:
        """Reload the data and run the handler once more."""
        refused = await self._reload_changed(job, changed)
        if refused is not None:
            return refused
        self._use_data(job)
        try:
            return await self._dispatch(job)
        except DataChangedError as error:
            return error_response(error, path=job.request.path)

    async def _reload_changed(self, job: InFlight, changed: DataChangedError) -> Result | None:
        """Reload data that has changed below a handler; return the result of the request if that fails."""
        log.warning("data changed, reloading", path=shown_path(job.request.path), reason=changed.message)
        try:
            # No second reload if another request has already caused one since this request began.
            await self.data.reload(unless=job.data)
        except RequestError as error:
            return error_response(error, path=job.request.path)
        except Exception as error:
            return await self._reload_failed(job, error)
        job.data_reloaded = True
        # Another job group: the first one has ended, and running tasks of an ended group count as strays.
        job.group_id = f"{job.group_id}-again"
        return None

    async def _reload_failed(self, job: InFlight, error: Exception) -> Result:
        try:
            return await self._dispatcher.reload_failed(error, job.call)
        except SessionLostError as lost:
            return self._session_lost(job, lost)

    def _session_lost(self, job: InFlight, error: SessionLostError) -> Result:
        """Make the worker exit, because no request can run in it; return the request to its queue as failed."""
        # Before the exit is requested: the last report names the requests that ran when the session was lost.
        self._evidence.lost_session.append(job.fingerprint)
        if self._alone is job:
            self._evidence.lost_session_alone = self._evidence.alone
        # The controller starts another worker, which builds a new session.
        self._runtime.request_exit(Unrecoverable(error.message))
        return Outcome.REJECTED

    def _use_data(self, job: InFlight) -> None:
        """Use the current data for the handler that begins. It is not older than the version that the request needs."""
        job.data, former = self.data.use(), job.data
        job.call.context = job.data.context
        if former is not None:
            self.data.release(former)

    def _with_data_version(self, job: InFlight, result: Result) -> Result:
        if not isinstance(result, Response) or job.data is None:
            return result
        if job.data.version is None and not job.data_reloaded and DATA_VERSION_HEADER not in result.headers:
            return result  # data without versions: nearly all workers
        headers = dict(result.headers)
        # A handler that answers with stored rows sets their version itself, None if it is unknown.
        version = headers.pop(DATA_VERSION_HEADER, job.data.version)
        if version is not None:
            headers[DATA_VERSION_HEADER] = version
        if job.data_reloaded:
            headers[DATA_RELOADED_HEADER] = True
        return replace(result, headers=headers)

    # -- streamed answers ----------------------------------------------------------------------------------------------

    async def _send_stream(self, job: InFlight, parts: ArrowStream) -> Result:
        """Send the parts of a streamed answer and return its final reply. Raises as `Dispatcher.run`, and
        `BrokerError`."""
        call, group_id = job.call, job.group_id
        try:
            response = await self.streams.send(job, lambda: self._dispatcher.next_part(parts, call, group_id=group_id))
        except (PublishRefusedError, BrokerAccessError) as error:
            # As in `_answer`: a failed delivery, so that the delivery limit ends the request.
            log.warning("part of a stream refused by its queue", path=shown_path(job.request.path), reason=str(error))
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
        # A suspect holds all slots, and keeps them so that it runs alone.
        if not job.has_slot or paused >= MAX_PAUSED:
            return False
        job.paused = True
        # RabbitMQ may deliver one more request, which gets this slot.
        job.set_aside()
        self._free_slot(job)
        return True

    async def _resume(self, job: InFlight) -> None:
        """Wait for a slot again."""
        await self._slots.acquire_again(job.priority)
        # No await between the grant and this line, as in `_run_in_slot`.
        job.has_slot, job.paused = True, False
        job.begin()

    async def _is_gone(self, job: InFlight) -> bool:
        """Whether the caller of a request with direct reply-to has disconnected; False if RabbitMQ does not answer."""
        reply_to = job.request.reply_to or ""
        # A passive declare of the address: RabbitMQ 3.10 returns mandatory replies that it has delivered (broker:
        # replies-are-never-mandatory).
        return reply_to.startswith(DIRECT_REPLY_TO) and await job.broker.caller_is_gone(reply_to)

    # -- the outcome ---------------------------------------------------------------------------------------------------

    async def _settle(self, job: InFlight, result: Result) -> None:
        """Reply and acknowledge, or return the request to RabbitMQ. Only the task that has claimed the request calls
        this."""
        # `_answer` returns after the confirm of the reply or of the copy. Until then the request is unacknowledged.
        outcome = await self._answer(job, result) if isinstance(result, Response) else result
        match outcome:
            case Response():
                # Crash before: the request is delivered again, and its caller gets two answers. After: it is answered.
                await job.ack()
                self._completed(job, str(outcome.status), code=outcome.code)
            case Outcome.RETRIED:
                # Crash before: the copy and the request, which is delivered again, are duplicates. After: the copy
                # alone remains.
                await job.ack()
                self._report(job, RETRIED)
            case Outcome.ABANDONED:
                # Crash before: the request is delivered again and checked again.
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
                if job.broker.counts_returns:
                    # It has ended no worker, whether it ran or not: this one lives on.
                    self._reporter.returned(job.fingerprint)
            case Outcome.REJECTED:
                # The delivery counts as failed, so that the delivery limit ends a request that fails each time.
                await job.reject()
            case Outcome.DEAD_LETTERED:
                # RabbitMQ moves the request in one step: at no time is it in neither queue.
                await job.reject(requeue=False)
            case Outcome.LOST:
                # A frame on its closed channel would close the whole connection (broker: channel-ends).
                pass

    async def _answer(self, job: InFlight, response: Response) -> Result:
        """Publish the retry of a failed request, or its reply, and wait for the confirm. Return the reply that was
        sent, or the outcome."""
        if job.progress:  # the final reply must come last
            await asyncio.wait(job.progress)
        # After the handler, because the retry terms of the route depend on the code of the response.
        retry = self._retries.plan(job.request, response, now_ms=now_ms(self._clock))
        if retry is not None:
            # Before the publish: a cancel that arrives from now on is remembered for the next attempt.
            job.will_be_retried = True
            if await self._retries.send(job.broker, job.delivery, job.request, retry):
                return Outcome.RETRIED
            job.will_be_retried = False
        try:
            # Over the connection that delivered the request, or one opened beside it: if that is lost, RabbitMQ
            # delivers the request again anyway.
            return await self._replies.send(
                job.broker.replies,
                job.request,
                with_attempts(job.request, response),
                on_wait=lambda error: self._wait_to_answer(job, error),
            )
        except (PublishRefusedError, BrokerAccessError) as error:
            log.warning("reply refused", path=shown_path(job.request.path), reason=str(error))
            # Its caller has given up; without a deadline, the next run may find room.
            return Outcome.ABANDONED if job.request.deadline_ms is not None else Outcome.REJECTED
        finally:
            job.answer_refused = None

    def _wait_to_answer(self, job: InFlight, error: OsrdyneError) -> None:
        """Let other requests run while the reply queue of this one is full, or RabbitMQ refuses to publish to it."""
        path = shown_path(job.request.path)
        log.warning("reply refused, it is tried until the deadline of the request", path=path)
        job.answer_refused = NO_PERMISSION if isinstance(error, BrokerAccessError) else FULL_QUEUE
        waiting = sum(other.waits_to_answer for other in self._jobs.values())
        # At most so many: each holds its answer in memory.
        if waiting < MAX_WAITING_TO_ANSWER:
            job.waits_to_answer = True
            job.set_aside()

    async def _reject(self, job: InFlight) -> None:
        """Return a request to its queue as failed, after an unexpected error."""
        if job.is_settled:
            return  # the report failed: RabbitMQ would close the channel that settles a delivery twice
        try:
            await job.reject()
        except BrokerError as error:
            self._drop(job, error)

    def _drop(self, job: InFlight, error: BrokerError) -> None:
        """Give up a request whose connection has failed, and close what is left of that connection: RabbitMQ requeues
        the request when its channel closes."""
        log.warning(
            "request dropped, RabbitMQ delivers it again", path=shown_path(job.request.path), reason=error.message
        )
        # The channel may still be open, for example if only the connection for replies has failed.
        if not job.delivery.channel.is_closed:
            job.broker.fail()

    def _completed(self, job: InFlight, status: str, *, code: int | None = None) -> None:
        # So that a cancel that arrives after the answer is not remembered: it would hit a later request.
        self._cancellations.completed(job.request.correlation_id, job.request.reply_to)
        self._report(job, status, code=code)

    def _report(self, job: InFlight, status: str, *, code: int | None = None) -> None:
        # First: if the report fails, the count of requests in flight must not be lowered twice.
        job.is_reported = True
        completion = Completion(
            status,
            # Other paths are arbitrary text of callers: each would need a report of its own, of any length.
            job.request.path if self._dispatcher.has_handler(job.request.path) else "",
            job.request.redelivered,
            route=self._route_of(job.request),
            priority=priority_of_delivery(job.delivery),
            code=code,
            probe=job.probe,
        )
        duration = self._clock.monotonic() - job.received_at
        # Only circuits count requests by their fingerprints, and only managed pools have them.
        request = job.fingerprint if self._retries.of_managed_pool else None
        self._reporter.completed(completion, duration_ms=int(duration * 1000), request=request)

    def _route_of(self, request: Request) -> str | None:
        """The route that the ingress has written; None in a direct pool, where a client may write the header."""
        route = decode_text(request.headers.get(ROUTE_HEADER)) if self._retries.of_managed_pool else None
        return None if route is None else header_text(route, limit=MAX_TEXT)

    # -- interruptions -------------------------------------------------------------------------------------------------

    def cancel(self, correlation_id: str | None, reply_to: str | None, *, keep_for: float = 0.0) -> None:
        """Cancel a request for its caller. One that is not here is answered `cancelled` when it arrives. `keep_for`:
        seconds for which it may wait for another attempt."""
        for job in self._jobs.values():
            if job.settling is not None and job.settling.done():
                continue  # it is settled, and only its handler still runs: the cancel may be for a later request
            if job.interruption in {Interruption.REQUEUED, Interruption.LOST}:
                continue  # it is returning to its queue: the cancel is for its next delivery
            if (job.request.correlation_id, job.request.reply_to) == (correlation_id, reply_to):
                self._interrupt(job, Interruption.CANCELLED)
                if not job.will_be_retried:
                    return
        # The cancel has overtaken the request, or the request is about to leave for its next attempt.
        self._cancellations.remember(correlation_id, reply_to, keep_for=keep_for)

    def requeue(self, *, channel: Channel | None = None, also_running: bool = False) -> None:
        """Requeue the requests that wait, or all of them; with `channel`, only those that arrived through it."""
        for job in list(self._jobs.values()):
            # Of one queue: the requests of other queues stay.
            if channel is not None and job.delivery.channel is not channel:
                continue
            if also_running or job.phase is Phase.WAITING:
                self._interrupt(job, Interruption.REQUEUED)

    def lose(self, channel: Channel) -> None:
        """Stop the work on the requests of a closed channel: RabbitMQ has requeued them."""
        for job in list(self._jobs.values()):
            # Not answered here: another worker may have the request by now, and will answer it.
            lost = job.delivery.channel is channel and self._interrupt(job, Interruption.LOST)
            if lost and not job.has_run:
                # RabbitMQ counts it, and only a request that runs can be the reason.
                self._reporter.returned(job.fingerprint)

    async def return_unused(self, delivery: Delivery, broker: BrokerConnection) -> None:
        """Return a delivery that was not accepted to its queue."""
        await delivery.nack(requeue=True)
        if broker.counts_returns:
            self._reporter.returned(delivery.fingerprint())

    def _arm(self, job: InFlight, seconds: float) -> None:
        """Set the deadline of a request to `seconds` from now."""
        job.disarm()
        # The handler reads the same limit (`Call.deadline`), so that it can stop by itself.
        job.call.set_timeout(seconds)
        job.timer = self._loop.call_later(seconds, self._expire, job)

    def _expire(self, job: InFlight) -> None:
        if not self._interrupt(job, Interruption.EXPIRED):
            self._watch_stuck(job)  # it was lost before; its handler must end now as well

    def _interrupt(self, job: InFlight, reason: Interruption) -> bool:
        """Stop the work on a request and settle it now; False if it is already settled or interrupted."""
        if not job.interrupt(reason):
            return False
        # A lost request keeps the timer of its deadline, at which its handler must end.
        if reason is not Interruption.LOST:
            self._watch_stuck(job)
        if job.in_handler:
            # In another task: the answer must not wait for a handler that may run on for minutes, or never end.
            job.settling = self._runtime.spawn(self._settle_interrupted(job, reason))
            self._abandon(job)
        return True

    async def _settle_interrupted(self, job: InFlight, reason: Interruption) -> None:
        if not job.claim():
            return  # its handler has ended, and `_process` settles it
        try:
            await self._settle(job, result_of(reason))
        except BrokerError as error:
            self._drop(job, error)
        except Exception:
            log.exception("interrupted request could not be settled")
            await self._reject(job)

    def _abandon(self, job: InFlight) -> None:
        """Free the slot of an interrupted handler that runs on, if the handler is `abandonable`."""
        if job.has_slot and self._may_abandon(job):
            self._free_slot(job)

    def _may_abandon(self, job: InFlight) -> bool:
        """Whether an interrupted handler may run on without a slot; marks its request as abandoned if so."""
        # Each such handler holds a thread, and the pool of threads has `max_abandoned` of them.
        abandoned = sum(other.is_abandoned and other.in_handler for other in self._jobs.values())
        if self._dispatcher.may_abandon(job.request.path) and abandoned < self._settings.max_abandoned:
            job.is_abandoned = True
        return job.is_abandoned

    def _watch_stuck(self, job: InFlight) -> None:
        job.disarm()
        # Replaces the timer of the deadline, which an interrupted request does not need.
        job.timer = self._loop.call_later(self._settings.stuck_grace, self._stuck, job)

    def _stuck(self, job: InFlight) -> None:
        """Make the worker exit if the handler of an interrupted request still runs."""
        if job.interruption is None or not job.in_handler:
            return
        path = shown_path(job.request.path)
        log.error("handler does not end", path=path, reason=str(job.interruption))
        # Only the first one, because it may block the others; and no batch, where any request may be the cause.
        if not self._evidence.stuck and job.batch_size <= 1:
            # In the last report: the controller refuses the text once it has ended a second worker this way.
            self._evidence.stuck = text_fingerprint(job.request.path, job.request.body)
        reason = f"The handler of {path!r} did not end when it was cancelled."
        # Python cannot end a thread from outside: only the end of the process frees its resources.
        self._runtime.request_exit(Unrecoverable(reason))

    # -- reports -------------------------------------------------------------------------------------------------------

    def running_requests(self) -> list[str]:
        """Fingerprints of the requests whose handlers run now, settled or not, or ran when the session was lost."""
        # With those that wait for a reload, which may end the worker as a handler may.
        running = [job.fingerprint for job in self._jobs.values() if job.in_handler or job.waits_for_data]
        # Bounded, to keep reports small. Those of the lost session come first, as the likely cause.
        return [*self._evidence.lost_session, *running][:MAX_NAMED_REQUESTS]

    def _evidence_fields(self) -> Mapping[str, object]:
        fields = self._evidence.fields(suspects=sum(job.is_suspect for job in self._jobs.values()))
        waiting = (job for job in self._jobs.values() if not (job.has_run or job.is_settled))
        named = [job.fingerprint for job in islice(waiting, MAX_NAMED_REQUESTS)]  # no others are hashed
        refused = Counter(job.answer_refused for job in self._jobs.values() if job.answer_refused is not None)
        more = {WAITING_FIELD: named, WAITING_ANSWERS_FIELD: dict(refused)}
        return {**fields, **{name: value for name, value in more.items() if value}}

    async def progress(self) -> Mapping[str, int]:
        """The progress of the running requests in the session; empty if unknown."""
        running = list({job.group_id for job in self._jobs.values() if job.in_handler})
        try:
            return await self._dispatcher.progress(self.context.session, running) if running else {}
        except Exception:
            log.warning("session progress unknown", exc_info=True)
            return {}
