"""The way of a request through the worker: look at it, run it, reply with a confirm, acknowledge.

Intakes hand deliveries over (`accept`); each gets one task. The deadline, the caller's cancel, a pause and a lost
channel all come in as interruptions. Source: docs/reference/protocol/workers.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from osrdyne.aio.clock import Clock, now_ms
from osrdyne.amqp import Channel, Delivery
from osrdyne.amqp.direct_reply_to import DIRECT_REPLY_TO
from osrdyne.errors import BrokerError, PublishRefusedError
from osrdyne.logs import get_logger
from osrdyne.protocol.activity import REPLY_TO_REFUSED, RETRIED, Event
from osrdyne.protocol.fingerprints import (
    ALONE_FIELD,
    MAX_NAMED_REQUESTS,
    STUCK_FIELD,
    SUSPECTS_FIELD,
    text_fingerprint,
)
from osrdyne.protocol.messages import REPLAY_HEADER, ROUTE_HEADER, Request, Response, header_text
from osrdyne.protocol.reply_addresses import ReplyAddresses
from osrdyne.protocol.retries import read_attempts
from osrdyne.protocol.statuses import decode_text
from osrdyne_worker.app.app import Context
from osrdyne_worker.app.call import Call
from osrdyne_worker.app.codec import shown_path
from osrdyne_worker.requests.cancellations import CancelMemory
from osrdyne_worker.requests.dispatch import Dispatcher, SessionLostError
from osrdyne_worker.requests.inflight import InFlight, Interruption, Phase, Slots
from osrdyne_worker.requests.outcome import Result, Settlement, first_look, result_of, time_left, time_to_work
from osrdyne_worker.requests.prefetch import Place
from osrdyne_worker.requests.priorities import Backlog, Backlogs
from osrdyne_worker.requests.progress import ProgressSender
from osrdyne_worker.requests.replies import ReplySender
from osrdyne_worker.requests.retries import Retries, class_of_delivery, counted
from osrdyne_worker.requests.suspects import (
    ALONE_TIMEOUT,
    PATIENCE,
    SUSPECT_RANK,
    VERDICT_TIME,
    PoisonTexts,
    is_suspect,
    refusal,
)
from osrdyne_worker.runtime.connection import Link
from osrdyne_worker.runtime.exit import BeyondHelp
from osrdyne_worker.runtime.reports import Outcome, Reporter
from osrdyne_worker.runtime.settings import RuntimeSettings

MAX_ROUTE = 200
"""Characters of a route's name in a report."""

log = get_logger("worker")


class Processor:
    """Works on requests, at most `concurrency` at once. `spawn` starts a task that the worker owns."""

    def __init__(
        self,
        *,
        context: Context,
        dispatcher: Dispatcher,
        reporter: Reporter,
        sender: ReplySender,
        retries: Retries,
        addresses: ReplyAddresses,
        settings: RuntimeSettings,
        spawn: Callable[..., asyncio.Task[None]],
        give_up: Callable[[BeyondHelp], None],
        clock: Clock,
        poison: PoisonTexts | None = None,
        on_alone: Callable[[], None] = lambda: None,
    ) -> None:
        self.context = context
        self._dispatcher = dispatcher
        self._reporter = reporter
        self._sender = sender
        self._retries = retries
        self._addresses = addresses
        self._settings = settings
        self._spawn = spawn
        self._give_up = give_up
        self._clock = clock
        self.backlogs = Backlogs(clock)
        self._slots = Slots(settings.concurrency, backlogs=self.backlogs, spawn=spawn)
        self._jobs: dict[int, InFlight] = {}
        self._lost_session: list[str] = []
        self._logged_reply_to = False
        reporter.watch(self.running_requests, self._suspicion)
        self.poison = poison or PoisonTexts(clock)
        self._on_alone = on_alone
        self._alone: InFlight | None = None
        self._text_alone = ""
        self._died_alone: str | None = None
        self._stuck_text: str | None = None
        """The text of the first request whose handler did not end: this worker ends because of it."""
        self.intakes = 0
        """How many queues are consumed now."""
        self._cancels = CancelMemory(clock)
        self._loop = asyncio.get_running_loop()
        self._progress = ProgressSender(sender, spawn)
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        return len(self._jobs)

    async def until_idle(self) -> None:
        """Wait until no request is in this worker."""
        await self._idle.wait()

    @property
    def free_slots(self) -> int:
        """How many requests could begin to run now."""
        return self._slots.free

    def accept(
        self,
        delivery: Delivery,
        *,
        rank: int,
        link: Link,
        backlog: Backlog | None = None,
        place: Place | None = None,
    ) -> None:
        """Take a delivery over; `rank` 0 is the highest priority. Never fails, whatever the delivery holds."""
        request = delivery.to_request(now_ms=now_ms(self._clock))
        self._count += 1
        call = Call(self.context, request, clock=self._clock)
        job = InFlight(
            delivery=delivery,
            request=request,
            call=call,
            link=link,
            group_id=f"{self.context.worker_id}-{self._count}",
            rank=rank,
            received_at=self._clock.monotonic(),
            backlog=backlog,
            place=place,
        )
        if backlog is not None:
            backlog.came()
        if request.wants_progress:  # others may take the first reply for the last
            call.attach(partial(self._progress.send, job))
        self._jobs[self._count] = job
        self._idle.clear()
        job.task = self._spawn(self._process(job, self._count))
        self._reporter.received()

    def cancel(self, correlation_id: str | None, reply_to: str | None, *, keep_for: float = 0.0) -> None:
        """The caller wants no answer any more. A request that has not come yet is answered when it does; it may wait
        for another attempt for `keep_for` seconds."""
        for job in self._jobs.values():
            if job.settling is not None and job.settling.done():
                continue  # only its handler is left; a later request may have its correlation id
            if (job.request.correlation_id, job.request.reply_to) == (correlation_id, reply_to):
                self._interrupt(job, Interruption.CANCELLED)
                if not job.goes_to_wait:
                    return
        self._cancels.remember(correlation_id, reply_to, keep_for=keep_for)

    def give_back(self, *, channel: Channel | None = None, also_running: bool = False) -> None:
        """Give requests back to the queue: those that wait, or all; only what came over `channel` when it is given."""
        for job in list(self._jobs.values()):
            if channel is not None and job.delivery.channel is not channel:
                continue
            if also_running or job.phase is Phase.WAITING:
                self._interrupt(job, Interruption.GIVEN_BACK)

    def lose(self, channel: Channel) -> None:
        """A channel is closed: RabbitMQ has taken back what came over it."""
        for job in list(self._jobs.values()):
            if job.delivery.channel is channel:
                self._interrupt(job, Interruption.LOST)

    @property
    def runs_alone(self) -> bool:
        """Whether a suspect runs, or is about to: nothing else is to be taken meanwhile."""
        return self._alone is not None

    def _suspicion(self) -> Mapping[str, object]:
        """What reports say of requests that end workers."""
        count = sum(job.is_suspect for job in self._jobs.values())
        text = self._died_alone or (self._text_alone if self._alone is not None else None)
        found: dict[str, object] = {SUSPECTS_FIELD: count, ALONE_FIELD: text, STUCK_FIELD: self._stuck_text}
        return {name: value for name, value in found.items() if value}

    def running_requests(self) -> list[str]:
        """Fingerprints of the requests whose handlers run now, answered or not, or ran when the session was lost."""
        running = [job.fingerprint for job in self._jobs.values() if job.in_handler]
        return [*self._lost_session, *running][:MAX_NAMED_REQUESTS]

    async def progress(self) -> Mapping[str, int]:
        """How far the session is with the running requests; empty when it does not say."""
        running = [job.group_id for job in self._jobs.values() if job.in_handler]
        try:
            return await self._dispatcher.progress(self.context.session, running) if running else {}
        except Exception:
            log.warning("the session does not say how far it is", exc_info=True)
            return {}

    async def _process(self, job: InFlight, number: int) -> None:
        job.started = True
        claimed = False
        try:
            result = await self._work(job)
            job.disarm()
            if claimed := job.claim():
                await self._settle(job, result)
        except BrokerError as error:
            self._dropped(job, error)
        except Exception:
            log.exception("a request could not be processed")
            if claimed or job.claim():
                await self._reject(job)
        finally:
            job.disarm()
            if job.settling is not None:
                await asyncio.wait({job.settling})
            if not job.is_reported:
                self._reporter.dropped()
            del self._jobs[number]
            job.leave()
            if not self._jobs:
                self._idle.set()

    def _dropped(self, job: InFlight, error: BrokerError) -> None:
        """Without an acknowledgement RabbitMQ delivers it again; it must notice that soon."""
        log.warning("a request was dropped; RabbitMQ delivers it again", path=job.request.path, reason=error.message)
        if not job.delivery.channel.is_closed:
            job.link.fail()

    async def _reject(self, job: InFlight) -> None:
        try:
            await job.reject()
        except BrokerError as error:
            self._dropped(job, error)

    async def _work(self, job: InFlight) -> Result:
        """Everything up to the result; an interruption is a result, the end of the worker is not."""
        try:
            early = self._first_look(job)
            if early is not None:
                return early
            result = await self._run_in_slot(job)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if job.interruption is None or task is None or task.uncancel() > 0:
                raise
        if job.interruption is not None:
            return result_of(job.interruption)
        return result

    def _first_look(self, job: InFlight) -> Result | None:
        request = job.request
        reason = self._addresses.refuse(request.reply_to)
        if reason is not None and job.interruption is None:
            self._log_reply_to(job, reason)
            return Settlement.REFUSE
        left = time_left(request, now_ms=now_ms(self._clock), settings=self._settings)
        tried = self._retries.of_managed_pool and read_attempts(request.headers) > 0
        was_cancelled = self._cancels.take(request.correlation_id, request.reply_to, tried_before=tried)
        early = first_look(interruption=job.interruption, was_cancelled=was_cancelled, left=left)
        job.is_suspect = is_suspect(request)
        if early is None:
            early = self._refusal(job)
        if early is None and left is not None:
            self._arm(job, left)
        return early

    def _log_reply_to(self, job: InFlight, reason: str) -> None:
        """Once: a worker has one key, and the controller counts the others."""
        if not self._logged_reply_to:
            self._logged_reply_to = True
            address = header_text(job.request.reply_to or "", limit=MAX_ROUTE)
            log.warning("request dropped, it would be answered where no answer may go", reason=reason, reply_to=address)

    def _refusal(self, job: InFlight) -> Result | None:
        """What becomes of a request whose text is refused: one that was run before is kept for a person."""
        seconds = self.poison.seconds_left(job.request)
        if not seconds or (REPLAY_HEADER in job.request.headers and not job.is_suspect):
            return None  # a person has sent it again
        log.warning("a request is refused, its text has ended workers", path=shown_path(job.request.path))
        return Settlement.POISON if job.is_suspect else refusal(job.request, seconds)

    async def _run_last(self, job: InFlight) -> Result:
        """Run a suspect when there is nothing else to do, with nothing else in this worker.

        The broker knows that it is here before others may run: should the worker die now, the controller does not
        take it for one that dies without a reason. It knows that it runs alone before it does. A death in between
        leaves the request a suspect; RabbitMQ's delivery limit counts in any case.
        """
        await self._reporter.tell_running()
        job.put_aside()
        if job.request.delivery_count >= 2:
            await self._clock.sleep(VERDICT_TIME)
        await self._slots.acquire_all(SUSPECT_RANK, patience=PATIENCE)
        try:
            job.phase = Phase.RUNNING
            self._alone, self._text_alone = job, ""
            self._on_alone()
            await self._until_alone(job)
            early = self._refusal(job)
            if early is not None:
                return early
            self._text_alone = text_fingerprint(job.request.path, job.request.body)
            return await self._run_now(job)
        finally:
            job.in_handler = False
            self._alone = None
            self._slots.release(all_places=True)
            self._on_alone()
            self._reporter.report(Event.BUSY, in_flight=self._reporter.in_flight)  # it is not to blame for what follows

    async def _until_alone(self, job: InFlight) -> None:
        """Others that were put aside go back to their queues meanwhile, and nothing new comes."""
        until = self._clock.monotonic() + ALONE_TIMEOUT
        while (len(self._jobs) > 1 or self.intakes) and self._clock.monotonic() < until:
            await self._clock.sleep(0.01)

    async def _run_in_slot(self, job: InFlight) -> Result:
        if job.is_suspect:
            return await self._run_last(job)
        if not self._slots.try_acquire(job.rank):
            await self._slots.acquire(job.rank)
        job.has_slot = True
        job.begin()
        try:
            return await self._run_now(job)
        finally:
            job.in_handler = False
            self._free_slot(job)

    async def _run_now(self, job: InFlight) -> Result:
        try:
            job.phase = Phase.RUNNING
            job.in_handler = True
            left = time_left(job.request, now_ms=now_ms(self._clock), settings=self._settings)
            self._arm(job, time_to_work(left, self._settings))
            if await self._is_abandoned(job):
                return Settlement.ABANDON
            if job.request.redelivered:
                await self._reporter.tell_running()
            return await self._dispatcher.run(job.call, group_id=job.group_id)
        except SessionLostError as error:
            self._lost_session.append(job.fingerprint)
            if self._alone is job:
                self._died_alone = self._text_alone
            self._give_up(BeyondHelp(error.message))
            return Settlement.REJECT

    def _free_slot(self, job: InFlight) -> None:
        if job.has_slot:
            job.has_slot = False
            self._slots.release()

    async def _is_abandoned(self, job: InFlight) -> bool:
        reply_to = job.request.reply_to
        if not self._settings.skip_abandoned or reply_to is None or not reply_to.startswith(DIRECT_REPLY_TO):
            return False
        return await job.link.caller_is_gone(reply_to)

    def _arm(self, job: InFlight, seconds: float) -> None:
        job.disarm()
        job.call.set_timeout(seconds)
        job.timer = self._loop.call_later(seconds, self._expire, job)

    def _expire(self, job: InFlight) -> None:
        if not self._interrupt(job, Interruption.EXPIRED):
            self._watch_stuck(job)  # lost before; its thread has had its time as well

    def _interrupt(self, job: InFlight, reason: Interruption) -> bool:
        """Stop the work on a request, and settle it now: its handler may go on for a while, or never end."""
        if not job.interrupt(reason):
            return False
        if reason is not Interruption.LOST:
            self._watch_stuck(job)
        if job.in_handler:
            job.settling = self._spawn(self._settle_interrupted(job, reason))
            self._abandon(job)
        return True

    async def _settle_interrupted(self, job: InFlight, reason: Interruption) -> None:
        if not job.claim():
            return  # the handler ended at once, and the request's own task settles it
        try:
            await self._settle(job, result_of(reason))
        except BrokerError as error:
            self._dropped(job, error)
        except Exception:
            log.exception("an interrupted request could not be settled")
            await self._reject(job)

    def _abandon(self, job: InFlight) -> None:
        """Give the place of an interrupted handler to the next request at once, where its application allows it."""
        abandoned = sum(other.in_handler and not other.has_slot for other in self._jobs.values())
        if self._dispatcher.may_abandon(job.request.path) and abandoned < self._settings.max_abandoned:
            self._free_slot(job)

    def _watch_stuck(self, job: InFlight) -> None:
        job.disarm()
        job.timer = self._loop.call_later(self._settings.stuck_grace, self._stuck, job)

    def _stuck(self, job: InFlight) -> None:
        """The handler goes on although it was cancelled: its request is settled, and this process must end."""
        if job.interruption is None or not job.in_handler:
            return
        log.error("a handler does not end", path=job.request.path, reason=str(job.interruption))
        if self._stuck_text is None:  # others may be stuck because of this one
            self._stuck_text = text_fingerprint(job.request.path, job.request.body)
        self._give_up(BeyondHelp(f"The handler of {job.request.path!r} did not end when it was cancelled."))

    async def _settle(self, job: InFlight, result: Result) -> None:
        """Reply and acknowledge, or give back: for the task that has claimed the request."""
        if isinstance(result, Response):
            if job.progress:
                await asyncio.wait(job.progress)
            if await self._goes_to_wait(job, result):
                await job.ack()
                return self._report(job, RETRIED)
            try:
                await self._sender.send(job.link.replies, job.request, counted(job.request, result))
            except PublishRefusedError as error:
                log.warning("the reply queue takes no reply", path=job.request.path, reason=str(error))
                result = Settlement.REJECT
            else:
                await job.ack()
                self._completed(job, str(result.status))
                return
        await self._settle_without_reply(job, result)

    async def _goes_to_wait(self, job: InFlight, outcome: Response) -> bool:
        """Whether the request is to be tried again, and RabbitMQ has it for that."""
        retry = self._retries.plan(job.request, outcome, now_ms=now_ms(self._clock))
        if retry is None:
            return False
        job.goes_to_wait = True
        job.goes_to_wait = await self._retries.send(job.link, job.delivery, job.request, retry)
        return job.goes_to_wait

    async def _settle_without_reply(self, job: InFlight, settlement: Settlement) -> None:
        match settlement:
            case Settlement.ABANDON:
                await job.ack()
                return self._completed(job, "abandoned")
            case Settlement.REFUSE:
                await job.delivery.ack()
                return self._report(job, REPLY_TO_REFUSED)
            case Settlement.GIVE_BACK:
                await job.nack()
            case Settlement.REJECT:
                await job.reject()
            case Settlement.POISON:
                await job.reject(requeue=False)
            case Settlement.DROP:
                pass

    def _completed(self, job: InFlight, status: str) -> None:
        self._cancels.completed(job.request.correlation_id, job.request.reply_to)
        self._report(job, status)

    def _report(self, job: InFlight, status: str) -> None:
        job.is_reported = True
        path = job.request.path if self._dispatcher.knows(job.request.path) else ""
        duration = self._clock.monotonic() - job.received_at
        outcome = Outcome(
            status,
            path,
            job.request.redelivered,
            route=self._route_of(job.request),
            priority=class_of_delivery(job.delivery),
        )
        self._reporter.completed(outcome, duration_ms=int(duration * 1000))

    def _route_of(self, request: Request) -> str | None:
        """As the ingress says; without one it is the caller's word, who could make reports many and long."""
        route = decode_text(request.headers.get(ROUTE_HEADER)) if self._retries.of_managed_pool else None
        return None if route is None else header_text(route, limit=MAX_ROUTE)
