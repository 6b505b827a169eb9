"""The forwarder: takes requests from the orphan queue, has the queues of their groups bound, and publishes them there.

Both kinds of pool use it. A `Router` decides where a request goes: `DirectRouter` (orphans.py) sends it to the group of
its key, `IngressRouter` (ingress.py) applies the splitter and the routes. The first section of `Forwarder` has the
methods that every forwarded request passes, in their order, from `run`, which takes it, to `_acknowledge`. The sections
after it have what only some requests need.

A request stays unacknowledged until all of its deliveries are confirmed or its client is answered, so that a crash in
between returns it to the orphan queue (lifecycle: "Activation and forwarding"). It waits for the bind of its queue, at
most until its deadline; the bind itself waits for a stop of the group (lifecycle: bind-waits-for-stop). Requests of one
key are published in their order, those of different keys concurrently. An unexpected error makes the request a dead
letter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from typing import Protocol

from osrdyne.aio.clock import now_ms, sleep_until
from osrdyne.aio.tasks import KeyedJobs
from osrdyne.amqp import Consumer, Delivery, Message
from osrdyne.errors import (
    BrokerConflictError,
    BrokerSilentError,
    MessageTooLargeError,
    PublishRefusedError,
    QueueFullError,
)
from osrdyne.ingress.acceptance import RoutedRequest
from osrdyne.ingress.checks import Refusal
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import Publisher
from osrdyne.pool.queues.loop import RequestQueuesLoop
from osrdyne.pool.state.groups.admission import Admission
from osrdyne.pool.state.groups.tracker import PoolStateTracker
from osrdyne.pool.state.observed import QueueStatuses
from osrdyne.processors.consumers import ErrorBoundary, to_dead_letters
from osrdyne.processors.prefetch import AdaptivePrefetch
from osrdyne.processors.publish_order import PublishOrder, Ticket
from osrdyne.processors.replies import Replier, SetAside, until_set_aside
from osrdyne.processors.requests.forwarding import (
    COPY_DROPPED,
    PUBLISH_RETRY,
    UNCONFIRMED_RETRY,
    LoggedRefusal,
    Orphan,
    hops_of,
    refuse_for,
    seconds_left,
    was_accepted,
)
from osrdyne.processors.requests.lengths import RETURNED, QueueLengths
from osrdyne.processors.requests.telemetry import OUTCOME as LOGGED
from osrdyne.processors.requests.telemetry import LogWriter
from osrdyne.processors.requests.waiting import WaitingRequest
from osrdyne.protocol.names import Key
from osrdyne.protocol.statuses import Status

# Outcome of a request that a full queue discards; its caller is answered `ok`, with the code 202.
DISCARDED = "discarded"
# An unexpected error: the request becomes a dead letter, and is answered or kept as poison.
FAILED = Refusal(Status.REJECTED, "The controller failed to forward the request.")
NOT_BOUND = Refusal(Status.EXPIRED, "The request expired before its queue was bound.")
NOT_CONFIRMED = Refusal(Status.EXPIRED, "The request expired before a queue confirmed it.")
FULL = Refusal(
    Status.MAXLEN, "The request queue of this key accepts no requests: it is full or has no leader. Try again later."
)


class Router(Protocol):
    """The decisions about requests of one kind of pool, and the metrics of their outcomes."""

    in_sequence: bool
    """Whether a request is published only after the confirm of the one before it with the same key."""
    forwarded: str
    """The outcome that is counted for a confirmed delivery."""

    def receive(self, delivery: Delivery) -> Orphan | None:
        """The request with the key of its group; None for a forged one, which is counted and dropped. One with a
        `token` has to pass `identify` first."""
        ...

    async def identify(self, orphan: Orphan) -> Orphan:
        """Verify the token of a request, which then has the key of its group."""
        ...

    async def route(self, orphan: Orphan) -> list[RoutedRequest] | Refusal | LoggedRefusal:
        """The deliveries of the request: first the one that keeps its reply address, then one-way copies. Otherwise the
        reason of its refusal. Does not wait between its decision and its return."""
        ...

    async def prepare(self, routed: RoutedRequest) -> None:
        """Make sure that the exchange of its priority level exists, and wait until a pause of its group is sent to the
        workers. Raises `BrokerConflictError`."""
        ...

    def exchange_for(self, routed: RoutedRequest) -> str: ...

    def message(self, orphan: Orphan, routed: RoutedRequest, *, maybe_delivered: bool) -> Message:
        """The message to publish now."""
        ...

    def note_published(self, routed: RoutedRequest, *, began_at: float) -> None:
        """Note a confirmed delivery, whose publish began at this monotonic time."""
        ...

    def count(self, outcome: str, routed: RoutedRequest | None = None, *, again: bool = False) -> None:
        """Count an outcome. `routed`: None if it was decided before routing. `again`: an earlier leader may have
        answered the request with it."""
        ...


class Forwarder:
    """Consumes the orphan queue."""

    def __init__(
        self,
        context: TermContext,
        router: Router,
        *,
        tracker: PoolStateTracker,
        admission: Admission,
        queue_status: QueueStatuses,
        queue_loop: RequestQueuesLoop,
        publish_order: PublishOrder,
        publisher: Publisher,
        replier: Replier,
        lengths: QueueLengths | None = None,
        log_writer: LogWriter | None = None,
    ) -> None:
        requests = context.settings.requests
        self._clock, self._metrics = context.clock, context.metrics
        self._max_message_bytes = requests.max_message_bytes
        self._router = router
        self._tracker = tracker
        self._admission = admission
        self._queue_status = queue_status
        self._queue_loop = queue_loop
        self._publish_order = publish_order
        self._publisher = publisher
        self._replier = replier
        self._lengths = lengths  # None in a direct pool, where requests of a bound key bypass the forwarder
        self._log_writer = log_writer  # None in a direct pool, which has no routes
        self._writes: dict[Delivery, asyncio.Task[Refusal | None]] = {}
        self._names = context.names
        self._jobs: KeyedJobs[str, Orphan]
        self._identifying: KeyedJobs[str, Orphan]
        self._admissions: KeyedJobs[Key, WaitingRequest]
        self._group: asyncio.TaskGroup
        self._prefetch: AdaptivePrefetch
        self._log: Logger = get_logger("forwarder", pool=context.names.pool)

    # --- from the orphan queue to the acknowledgement

    async def run(self, consumer: Consumer) -> None:
        """Forward requests until the consumer ends; then finish those that were taken. Requests that wait for room in
        a full queue return to the orphan queue."""
        try:
            await self._run(consumer)
        finally:
            if self._lengths is not None:
                self._lengths.waiting.close()

    async def _run(self, consumer: Consumer) -> None:
        self._prefetch = AdaptivePrefetch(consumer, max_message_bytes=self._max_message_bytes, clock=self._clock)
        async with asyncio.TaskGroup() as self._group:
            adapting = self._group.create_task(self._prefetch.run(), name="prefetch of orphans")
            # One job at a time for each key: a request that waits for a bind delays its own key and no other.
            self._jobs = KeyedJobs(self._group, "requests of", self._forward)
            # Tokens whose verification needs a thread or fetched keys: in order for each key of the client.
            self._identifying = KeyedJobs(self._group, "tokens for", self._identify)
            # Requests for a queue of limited length wait for room here, one after the other for each group.
            self._admissions = KeyedJobs(self._group, "admission to", self._enqueue)
            ending = self._group.create_task(self._end_waits(), name="ends of waits for room")
            async for delivery in consumer:
                # From here to the acknowledgement the request is unacknowledged: a crash at any point between returns
                # it to the orphan queue, marked as redelivered.
                self._prefetch.take(delivery)
                with ErrorBoundary(delivery, self._log) as boundary:
                    orphan = self._router.receive(delivery)
                if boundary.failed:
                    await self._dead_letter(delivery)
                elif orphan is None:
                    # Crash before: a forged request returns and is dropped again. After: it is gone, unanswered.
                    await self._acknowledge(delivery)
                elif orphan.token is not None or self._identifying.is_busy(orphan.client_key):
                    # Also without a token: it must not overtake requests of its key whose tokens are being verified.
                    self._identifying.submit(orphan.client_key, orphan)
                else:
                    # By the key of the group: the groups that the splitter makes of one key do not wait for each other.
                    self._jobs.submit(orphan.request.key, orphan)
            # The consumer has ended, so that no further message can arrive. The task group waits for the requests that
            # were taken, except for those that wait for room: they return to the orphan queue when the channel closes.
            adapting.cancel()
            ending.cancel()
            if self._lengths is not None:
                self._lengths.finish()

    async def _forward(self, orphan: Orphan) -> None:
        """Route a request and start its publish; the next request of the key follows when this returns."""
        with ErrorBoundary(orphan.delivery, self._log) as boundary:
            decision = await self._router.route(orphan)
            # Before the admission: a refused request must neither start a group nor count as a use of its key.
            if isinstance(decision, Refusal):
                await self._refuse(orphan, decision)
                return
            if isinstance(decision, LoggedRefusal):
                self._begin_write(orphan, [decision.request, decision.write])
                await self._refuse(orphan, decision.refusal, decision.request)
                return
            # Before the admission: the log gets the message also if every group is refused.
            groups = self._begin_write(orphan, decision)
            if not groups:
                return  # the write acknowledges it
            routed = []
            for one in groups:
                # All groups are admitted before any is required: a refused request then starts no group.
                refusal = self._admit(one.key)
                if refusal is None:
                    routed.append(one)
                elif one.keeps_reply:
                    await self._refuse(orphan, refusal, one)
                    return
                else:
                    self._router.count(COPY_DROPPED, one)
            if not routed:
                await self._acknowledge_once_written(orphan)
                return
            limited = self._is_limited(orphan, routed)
            for one in routed:
                if hops_of(orphan.request):
                    # It was forwarded when the key was bound, and returned: its queue or binding may be gone.
                    self._queue_loop.verify(one.key, since=orphan.at)
                # Held until the acknowledgement: the idle timer must not unbind the group (lifecycle:
                # pin-until-forwarded). Required at once: only the place of a group that the tracker has is freed again.
                self._tracker.hold(one.key)
                self._tracker.require_worker_group(one.key)
            if limited and not self._may_have_room(routed):
                is_publishing = False
            else:
                # Returns when the tickets are drawn, in a managed pool before the confirm: the next request of the key
                # may begin.
                is_publishing = await self._publish_when_bound(orphan, routed, limited=limited)
            if not is_publishing:
                self._wait_for_room(orphan, routed)
        if boundary.failed:
            await self._dead_letter(orphan.delivery)

    def _admit(self, key: Key) -> Refusal | None:
        """Request a place under `max_groups` for a group that is not up."""
        if self._tracker.status(key) is not None:
            return None
        # Reserved at once: two requests for new keys cannot both get the last place.
        verdict = self._admission.request(key)
        if self._admission.key_counter.take_warning():
            self._log.warning("nearly max_distinct_keys keys were used", keys=len(self._admission.key_counter))
        return refuse_for(verdict)

    async def _publish_when_bound(self, orphan: Orphan, routed: list[RoutedRequest], *, limited: bool = False) -> bool:
        """Wait until the queues are bound, then start the publishes, in the order of the requests of the key.

        `limited`: the queue has a limited length and must be known to have room. Returns False if it is not: then
        nothing is published, and the request still holds its group."""
        bound = list(routed)
        try:
            # The groups are held: one that is bound first stays bound while the request waits for the others.
            refusals = [await self._wait_until_bound(one) for one in routed]
        except BaseException:
            # The leader's term has ended, or the processor is cancelled: a group that stays held would never be
            # unbound.
            self._release(bound)
            raise
        for one, refusal in zip(routed, refusals, strict=True):
            if refusal is not None and one.keeps_reply:
                self._release(bound)
                await self._refuse(orphan, refusal, one)
                return True
            if refusal is not None:
                bound.remove(one)
                self._release([one])
                self._router.count(COPY_DROPPED, one)
        if not bound:
            # Only copies whose queues are unavailable: the log has the request, or will have it.
            await self._acknowledge_once_written(orphan)
            return True
        if limited and not (self._lengths is not None and self._lengths.admit_at_once(routed[0])):
            return False
        # Tickets are drawn, and tasks created, before the next request of the key: tasks begin in the order of their
        # creation, so that messages are written in the order of the requests.
        tickets = [self._publish_order.enter(one.key, one.priority) for one in bound]
        # A copy needs no acknowledgement of its own: the request is acknowledged after all of them.
        copies = [
            self._group.create_task(self._publish(orphan, one, ticket), name=f"copy for {one.key!r}")
            for one, ticket in zip(bound[1:], tickets[1:], strict=True)
        ]
        publish = partial(self._publish_and_acknowledge, orphan, bound, tickets[0], copies)
        name = f"request of {orphan.request.key!r}"
        if self._router.in_sequence:
            await until_set_aside(self._group, publish, name=name)
        else:
            self._group.create_task(publish(lambda: None), name=name)
        return True

    async def _wait_until_bound(self, routed: RoutedRequest) -> Refusal | None:
        """Wait until the queue of the group is bound; the refusal if it cannot be."""
        # Required again at each attempt, which is always safe (lifecycle: pin-until-forwarded).
        self._tracker.require_worker_group(routed.key)
        try:
            # The exchange of the level must exist: a publish to a missing one closes the publishing channel, and ends
            # the term.
            await self._router.prepare(routed)
            if not self._queue_status[routed.key].is_bound:
                # Never longer than the request may live: a queue that cannot be bound must not hold it unacknowledged
                # without end.
                limit = partial(sleep_until, routed.deadline.at_ms, self._clock)
                with self._metrics.activation_seconds.time():
                    await self._queue_status.wait_bound(routed.key, limit=limit)
        except BrokerConflictError as error:
            return Refusal(Status.START_FAILED, str(error))
        except TimeoutError:
            return NOT_BOUND
        return None

    async def _publish_and_acknowledge(
        self,
        orphan: Orphan,
        routed: Sequence[RoutedRequest],
        ticket: Ticket,
        copies: Sequence[asyncio.Task[Refusal | None]],
        set_aside: SetAside,
    ) -> None:
        """Publish the request, wait for its copies, and acknowledge it (lifecycle: ack-after-confirm)."""
        request, rest = routed[0], routed[1:]
        held = list(routed)

        def wait() -> None:
            # Only the request waits with its answer: its group, which refused it, may end meanwhile, and the others
            # when their queues have confirmed.
            held.clear()
            self._release([request])
            for one, publishing in zip(rest, copies, strict=True):
                publishing.add_done_callback(partial(lambda one, _: self._release([one]), one))
            set_aside()

        try:
            with ErrorBoundary(orphan.delivery, self._log) as boundary:
                # Copies are published at the same time; what the caller is answered depends on this one alone.
                refusal = await self._publish(orphan, request, ticket)
                if refusal is None:
                    self._metrics.forward_seconds.observe(self._clock.monotonic() - orphan.at)
                    self._router.count(self._router.forwarded, request)
                elif refusal is not FAILED and request.keeps_reply:
                    await self._answer(orphan, refusal, request, wait)
                elif refusal is not FAILED:
                    self._router.count(refusal.status.value, request)
                for one, publishing in zip(rest, copies, strict=True):
                    # Waited for before the acknowledgement: a crash now returns the request, and the copies are
                    # published again.
                    refused = await publishing
                    self._router.count(self._router.forwarded if refused is None else refused.status.value, one)
                if refusal is not FAILED:
                    # Crash before: the request returns and is published again, a duplicate. After: the queues of its
                    # groups alone have it.
                    await self._acknowledge(orphan.delivery)
            if boundary.failed or refusal is FAILED:
                await self._dead_letter(orphan.delivery)
        finally:
            # Last, after the acknowledgement: from here on the idle timer may unbind the groups.
            self._release(held)

    async def _publish(self, orphan: Orphan, routed: RoutedRequest, ticket: Ticket) -> Refusal | None:
        """Publish until a queue confirms; the refusal if no further attempt can succeed. Returns `FAILED` for an
        unexpected error."""
        # A redelivered request may have been published by an earlier leader, or by this one before its channel was
        # lost.
        maybe_delivered = orphan.delivery.redelivered
        began_at, failures = self._clock.monotonic(), 0
        # The ticket ends with the attempt, also on an error: those behind it never wait for a request that is gone.
        with ticket, ErrorBoundary(orphan.delivery, self._log):
            # The first attempt is made in any case: a request that is late by then expires in its queue, and is
            # answered as a dead letter.
            while not failures or self._seconds_left(routed) > 0:
                await ticket.turn()
                try:
                    # The queue was bound when the ticket was drawn. It may not be any more if the request waited for
                    # its turn: the queue was lost, or the priority levels changed.
                    if failures or not self._queue_status[routed.key].is_bound:
                        refusal = await self._wait_until_bound(routed)
                        if refusal is not None:
                            return refusal
                    # Crash before: no queue has the request, and it returns. After: the queue may have it, and it
                    # returns too; in a managed pool, the second delivery is marked as a possible duplicate.
                    await self._send(orphan, routed, maybe_delivered=maybe_delivered)
                    # After the confirm: a deadline that is noted for a refused publish would cause sweeps of the queue
                    # for nothing.
                    self._router.note_published(routed, began_at=began_at)
                    return None
                except QueueFullError:
                    # The queue has refused it (`overflow: reject-publish`) and has no copy: the client gets one answer.
                    return FULL
                except MessageTooLargeError as error:
                    # No further attempt: the same headers are too large each time.
                    return Refusal(Status.INVALID, str(error))
                except PublishRefusedError as error:
                    # Unroutable although the alternate exchange should take it: the orphan queue is missing.
                    failures += 1
                    delay = PUBLISH_RETRY.delay(failures)
                    self._log.warning("request not routed", key=routed.key, error=str(error), retry_in=delay)
                except BrokerSilentError as error:
                    # A queue that has lost its leader confirms nothing. Other keys are not affected.
                    maybe_delivered = True
                    failures += 1
                    delay = UNCONFIRMED_RETRY.delay(failures)
                    self._log.warning("request not confirmed", key=routed.key, error=str(error), retry_in=delay)
                # Requests behind this one would overtake it.
                ticket.hold_back()
                # Not beyond the deadline: its caller is answered then, and the requests behind it may be published.
                await self._clock.sleep(min(delay, self._seconds_left(routed)))
            return NOT_CONFIRMED
        return FAILED

    async def _send(self, orphan: Orphan, routed: RoutedRequest, *, maybe_delivered: bool) -> None:
        message = self._router.message(orphan, routed, maybe_delivered=maybe_delivered)
        # To the exchange and never to the queue: if the key is unbound meanwhile, the alternate exchange returns the
        # request (lifecycle: forward-to-exchange).
        exchange = self._router.exchange_for(routed)
        await self._publisher.publish(message, exchange=exchange, routing_key=routed.key, mandatory=True)

    def _seconds_left(self, routed: RoutedRequest) -> float:
        return seconds_left(routed, now_ms=now_ms(self._clock))

    async def _acknowledge(self, delivery: Delivery) -> None:
        """Acknowledge a request; first wait for its write to the log, if there is one."""
        write = self._writes.pop(delivery, None)
        # Crash before the end of the write: the request returns, and is written again.
        if write is not None and await write is FAILED:
            await self._dead_letter(delivery)
            return
        await delivery.ack()
        self._prefetch.finish(delivery)

    def _release(self, routed: Sequence[RoutedRequest]) -> None:
        for one in routed:
            self._tracker.release(one.key)

    # --- refused and failed requests

    async def _refuse(self, orphan: Orphan, refusal: Refusal, routed: RoutedRequest | None = None) -> None:
        """Answer the request and acknowledge it. `routed`: None if it was refused before routing. Returns earlier if
        the answer waits for its reply queue: the next request of the key may begin."""
        answer = partial(self._answer_and_acknowledge, orphan, refusal, routed)
        await until_set_aside(self._group, answer, name=f"answer for {orphan.request.key!r}")

    async def _answer_and_acknowledge(
        self, orphan: Orphan, refusal: Refusal, routed: RoutedRequest | None, set_aside: SetAside
    ) -> None:
        with ErrorBoundary(orphan.delivery, self._log) as boundary:
            await self._answer(orphan, refusal, routed, set_aside)
            # Crash before: the request returns and is answered a second time. After: it is gone, answered.
            await self._acknowledge_once_written(orphan)
        if boundary.failed:
            await self._dead_letter(orphan.delivery)

    async def _refuse_delivery(self, orphan: Orphan, refusal: Refusal, routed: RoutedRequest) -> None:
        """Refuse the first delivery, and with it all others. `routed`: that delivery; it is a copy if the log answers
        the caller."""
        if routed.keeps_reply:
            await self._refuse(orphan, refusal, routed)
        else:
            self._router.count(COPY_DROPPED, routed)
            await self._acknowledge_once_written(orphan)

    async def _acknowledge_once_written(self, orphan: Orphan) -> None:
        """Acknowledge a request that goes to no group, without waiting for its write to the log: the next request of
        the key may begin before the log confirms."""
        if orphan.delivery in self._writes:
            self._group.create_task(self._acknowledge(orphan.delivery), name=f"write of {orphan.request.key!r}")
        else:
            await self._acknowledge(orphan.delivery)

    async def _answer(
        self, orphan: Orphan, refusal: Refusal, routed: RoutedRequest | None, set_aside: SetAside
    ) -> None:
        def wait() -> None:
            self._prefetch.set_aside(orphan.delivery)
            set_aside()

        # Crash before: the request returns, unanswered. After: it returns and is answered a second time.
        code = HTTPStatus.ACCEPTED.value if refusal.discarded else None
        await self._replier.answer(
            orphan.request,
            refusal.status,
            refusal.detail,
            retry_after=refusal.retry_after,
            code=code,
            set_aside=wait,
        )
        outcome = DISCARDED if refusal.discarded else refusal.status.value
        self._router.count(outcome, routed, again=orphan.delivery.redelivered)
        self._log.info("request refused", key=orphan.request.key, status=outcome, detail=refusal.detail)

    async def _dead_letter(self, delivery: Delivery) -> None:
        # Waited for as before an acknowledgement: a dead letter does not return to be written again.
        if (write := self._writes.pop(delivery, None)) is not None:
            await write
        # Crash before: the request returns and fails again. After: it is in the dead letter queue alone.
        await to_dead_letters(delivery)
        self._prefetch.finish(delivery)
        self._router.count("failed")

    # --- requests with a token

    async def _identify(self, orphan: Orphan) -> None:
        """Verify the token of a request if it has one; the next request of the key follows when this returns."""
        # Crash from here on: the request returns to its place in the orphan queue, and is verified anew.
        with ErrorBoundary(orphan.delivery, self._log) as boundary:
            if orphan.token is not None:
                orphan = await self._router.identify(orphan)
        if boundary.failed:
            await self._dead_letter(orphan.delivery)
        else:
            self._jobs.submit(orphan.request.key, orphan)

    # --- requests for the log of telemetry

    def _begin_write(self, orphan: Orphan, routed: list[RoutedRequest]) -> list[RoutedRequest]:
        """Start the write to the log, if the request has one, and return the deliveries to groups. If there are none,
        the write acknowledges the request."""
        groups = [one for one in routed if one.log is None]
        for one in routed:
            # At most one: a pool has one log, and the routes one delivery for each endpoint.
            if one.log is not None and self._log_writer is not None:
                # The ticket is drawn before the next request of the key, as for the queue of a group.
                ticket = self._log_writer.enter(one)
                write = self._write if groups else self._write_and_acknowledge
                task = self._group.create_task(write(self._log_writer, orphan, one, ticket), name=f"log of {one.key!r}")
                if groups:
                    self._writes[orphan.delivery] = task
        return groups

    async def _write_and_acknowledge(
        self, writer: LogWriter, orphan: Orphan, routed: RoutedRequest, ticket: Ticket
    ) -> Refusal | None:
        """Write a request that goes to no group. One task for both: most messages of a log go nowhere else."""
        refusal = await self._write(writer, orphan, routed, ticket)
        if refusal is FAILED:
            await self._dead_letter(orphan.delivery)
        else:
            # Crash before: the request returns, and is written again. After: the log alone has it.
            await self._acknowledge(orphan.delivery)
        return refusal

    async def _write(self, writer: LogWriter, orphan: Orphan, routed: RoutedRequest, ticket: Ticket) -> Refusal | None:
        """Write to the log. Returns `FAILED` for an unexpected error."""
        with ErrorBoundary(orphan.delivery, self._log):
            set_aside = partial(self._prefetch.set_aside, orphan.delivery)
            refusal = await writer.write(orphan, routed, ticket, set_aside=set_aside)
            self._router.count(LOGGED if refusal is None else refusal.status.value, routed)
            return refusal
        return FAILED

    # --- requests for a queue of limited length

    def _is_limited(self, orphan: Orphan, routed: list[RoutedRequest]) -> bool:
        """Whether the request needs room in a queue of limited length; one that was accepted before has it."""
        lengths = self._lengths
        if lengths is None or was_accepted(orphan.delivery, self._names):
            return False
        # Also behind requests that wait since before a change of the policy: it must not overtake them.
        return any(lengths.limits(one.key) for one in routed) or self._admissions.is_busy(routed[0].key)

    def _may_have_room(self, routed: list[RoutedRequest]) -> bool:
        """Whether a request may be admitted to its limited queue without a wait: the queue is bound, and no request
        waits for room in it."""
        key = routed[0].key
        return len(routed) == 1 and self._queue_status[key].is_bound and not self._admissions.is_busy(key)

    def _wait_for_room(self, orphan: Orphan, routed: list[RoutedRequest]) -> None:
        """Pass the request to `_enqueue`, behind those that already wait for room."""
        assert self._lengths is not None
        # Crash from here to the publish: the request returns to its place in the orphan queue, and waits anew.
        self._prefetch.set_aside(orphan.delivery)
        self._admissions.submit(routed[0].key, self._lengths.waiting.add(orphan, routed))

    async def _enqueue(self, waiting: WaitingRequest) -> None:
        """Publish a request once its queue has room."""
        orphan, routed = waiting.orphan, waiting.routed
        assert self._lengths is not None
        request, copies = routed[0], routed[1:]
        with ErrorBoundary(orphan.delivery, self._log) as boundary:
            try:
                refusal = await self._lengths.admit(waiting, tasks=self._group)
                if refusal is None:
                    for one in copies:
                        if not await self._lengths.admit_copy(one):
                            routed.remove(one)
                            self._release([one])
                            self._router.count(COPY_DROPPED, one)
                # It may have been cancelled after it was admitted; its room is found again by the next count.
                refusal = refusal or waiting.refusal
            except BaseException:
                self._release(routed)
                raise
            finally:
                self._lengths.waiting.remove(waiting)
                self._prefetch.take_back(orphan.delivery)
            if refusal is None:
                await self._publish_when_bound(orphan, routed)
            else:
                self._release(routed)
                if refusal is not RETURNED:
                    await self._refuse_delivery(orphan, refusal, request)
        if boundary.failed:
            await self._dead_letter(orphan.delivery)

    async def _end_waits(self) -> None:
        """Answer requests that expire or are cancelled while they wait for room. Runs until cancelled."""
        if self._lengths is None:
            return
        while True:
            for waiting in await self._lengths.waiting.ended():
                if not self._admissions.withdraw(waiting.group, waiting):
                    # Its admission has begun, and returns the refusal.
                    waiting.pause.set()
                    continue
                self._lengths.waiting.remove(waiting)
                self._prefetch.take_back(waiting.orphan.delivery)
                self._release(waiting.routed)
                name = f"end of the wait of {waiting.orphan.request.key!r}"
                self._group.create_task(self._refuse_waiting(waiting), name=name)

    async def _refuse_waiting(self, waiting: WaitingRequest) -> None:
        """Answer a request that waits no longer."""
        assert waiting.refusal is not None
        with ErrorBoundary(waiting.orphan.delivery, self._log) as boundary:
            # Crash before: the request returns, waits anew, and is answered then; a cancelled one may run.
            await self._refuse_delivery(waiting.orphan, waiting.refusal, waiting.routed[0])
        if boundary.failed:
            await self._dead_letter(waiting.orphan.delivery)
