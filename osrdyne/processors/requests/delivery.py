"""The forwarder: takes requests from the orphan queue, has the queues of their groups bound, and publishes them there.

Both kinds of pool use it. A `Router` decides where a request goes: `DirectRouter` (orphans.py) sends it to the group of
its key, `IngressRouter` (ingress.py) asks splitter and routes. The methods below stand in the order in which a request
passes them, from `run`, which takes it, to `_publish_and_acknowledge`, which acknowledges it.

A request is held no longer than a bind takes, which itself waits for a stop of the group that is under way (lifecycle:
bind-waits-for-stop), nor longer than the request may live. It is acknowledged only when all of its deliveries are
confirmed or its client is answered, so that a crash in between returns it to the orphan queue (lifecycle: "Activation
and forwarding"). Requests of one key go in their order, keys go side by side. An unexpected error makes the request a
dead letter, in one step of RabbitMQ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from osrdyne.aio.clock import Backoff, now_ms, sleep_until
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
from osrdyne.ingress.requests import Arrival
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import Publisher
from osrdyne.pool.queues.loop import RequestQueuesLoop
from osrdyne.pool.state.admission import Admission
from osrdyne.pool.state.observed import QueueStatuses
from osrdyne.pool.state.tracker import PoolStateTracker
from osrdyne.processors.consumers import ErrorBoundary, to_dead_letters
from osrdyne.processors.prefetch import AdaptivePrefetch
from osrdyne.processors.publish_order import PublishOrder, Ticket
from osrdyne.processors.replies import Replier
from osrdyne.processors.requests.forwarding import Orphan, Refusal, hops_of, refuse_for
from osrdyne.protocol.deadlines import is_past
from osrdyne.protocol.names import Key
from osrdyne.protocol.statuses import Status

FORWARD_RETRY = Backoff(initial=0.2, maximum=5.0)
# After a publish without a confirm; each further publish may become one more copy of the request.
UNCONFIRMED_RETRY = Backoff(initial=5.0, maximum=120.0)

# Outcome of a one-way copy whose group is refused or whose queue is unavailable: the request itself goes on.
COPY_DROPPED = "copy-dropped"
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

    def receive(self, delivery: Delivery) -> Arrival | None:
        """The request with the key of its group; None for a forged one, which is counted and dropped."""
        ...

    def route(self, orphan: Orphan) -> list[RoutedRequest] | Refusal:
        """Where the request goes: first the delivery that keeps its reply address, then one-way copies."""
        ...

    async def require_priority(self, priority: int | None) -> None:
        """Have the exchange and the queues of a priority level. Raises `BrokerConflictError`."""
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
    ) -> None:
        requests = context.settings.requests
        self._clock, self._metrics = context.clock, context.metrics
        self._skew_ms = int(requests.max_clock_skew * 1000)
        self._max_message_bytes = requests.max_message_bytes
        self._router = router
        self._tracker = tracker
        self._admission = admission
        self._queue_status = queue_status
        self._queue_loop = queue_loop
        self._publish_order = publish_order
        self._publisher = publisher
        self._replier = replier
        self._group: asyncio.TaskGroup
        self._prefetch: AdaptivePrefetch
        self._log: Logger = get_logger("forwarder", pool=context.names.pool)

    async def run(self, consumer: Consumer) -> None:
        """Forward requests until the consumer ends; then finish those that were taken."""
        self._prefetch = AdaptivePrefetch(consumer, max_message_bytes=self._max_message_bytes, clock=self._clock)
        async with asyncio.TaskGroup() as self._group:
            adapting = self._group.create_task(self._prefetch.run(), name="prefetch of orphans")
            # One job at a time for each key: a request that waits for a bind delays its own key and no other.
            jobs: KeyedJobs[str, Orphan] = KeyedJobs(self._group, "requests of", self._forward)
            async for delivery in consumer:
                # From here to the acknowledgement the request is unacknowledged: a crash at any point between returns
                # it to the orphan queue, marked as redelivered.
                self._prefetch.take(delivery)
                with ErrorBoundary(delivery, self._log) as boundary:
                    arrival = self._router.receive(delivery)
                if boundary.failed:
                    await self._dead_letter(delivery)
                elif arrival is None:
                    # Crash before: a forged request returns and is dropped again. After: it is gone, unanswered.
                    await self._acknowledge(delivery)
                else:
                    # In order per key as soon as it is taken: the groups that the splitter makes of one key do not wait
                    # for each other.
                    jobs.submit(arrival.request.key, Orphan(delivery, arrival, self._clock.monotonic()))
            # The consumer has ended, so that no further message can arrive. The task group waits for the requests
            # taken.
            adapting.cancel()

    async def _forward(self, orphan: Orphan) -> None:
        """Route a request and start its publish; the next request of the key follows when this returns."""
        with ErrorBoundary(orphan.delivery, self._log) as boundary:
            decision = self._router.route(orphan)
            # Refused before a slot is asked for: such a request must neither start a group nor count as a use of its
            # key.
            if isinstance(decision, Refusal):
                await self._refuse(orphan, decision)
                return
            routed = []
            for one in decision:
                # All groups are asked before any is required: a refused request then leaves no group up behind it.
                refusal = self._admit(one.key)
                if refusal is None:
                    routed.append(one)
                elif one.keeps_reply:
                    await self._refuse(orphan, refusal, one)
                    return
                else:
                    self._router.count(COPY_DROPPED, one)
            for one in routed:
                if hops_of(orphan.request):
                    # It was forwarded when the key was bound, and returned: its queue or binding may be gone.
                    self._queue_loop.verify(one.key, since=orphan.at)
                # Held until the acknowledgement: the idle timer must not unbind the group (lifecycle:
                # pin-until-forwarded). Required before the wait, or its slot under `max_groups` would never be free.
                self._tracker.hold(one.key)
                self._tracker.require_worker_group(one.key)
            # Returns when the tickets are drawn, in a managed pool before the confirm: the next request of the key may
            # begin.
            await self._publish_when_bound(orphan, routed)
        if boundary.failed:
            await self._dead_letter(orphan.delivery)

    def _admit(self, key: Key) -> Refusal | None:
        """Ask for a slot for a group that is not up."""
        if self._tracker.status(key) is not None:
            return None
        # The answer takes the place at once: two requests for new keys cannot get the same last one.
        verdict = self._admission.request(key)
        if self._admission.key_counter.take_warning():
            self._log.warning("nearly max_distinct_keys keys were used", keys=len(self._admission.key_counter))
        return refuse_for(verdict)

    async def _publish_when_bound(self, orphan: Orphan, routed: list[RoutedRequest]) -> None:
        """Wait for the queues, in the order of the key's requests; the publishes then need no order of their own."""
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
                return
            if refusal is not None:
                bound.remove(one)
                self._release([one])
                self._router.count(COPY_DROPPED, one)
        # Tickets are drawn, and tasks created, before the next request of the key: tasks begin in the order of their
        # creation, so that messages are written in the order of the requests.
        tickets = [self._publish_order.enter(one.key, one.priority) for one in bound]
        # A copy needs no acknowledgement of its own: the request is acknowledged after all of them.
        copies = [
            self._group.create_task(self._publish(orphan, one, ticket), name=f"copy for {one.key!r}")
            for one, ticket in zip(bound[1:], tickets[1:], strict=True)
        ]
        publishing = self._publish_and_acknowledge(orphan, bound, tickets[0], copies)
        if self._router.in_sequence:
            await publishing
        else:
            self._group.create_task(publishing, name=f"request of {orphan.request.key!r}")

    async def _wait_until_bound(self, routed: RoutedRequest) -> Refusal | None:
        """Wait until the queue of the group is bound; the refusal if it cannot be."""
        # Required again at each attempt, which is always safe (lifecycle: pin-until-forwarded).
        self._tracker.require_worker_group(routed.key)
        try:
            # The exchange of the level must exist: a publish to a missing one closes the publishing channel, and ends
            # the term.
            await self._router.require_priority(routed.priority)
            if not self._queue_status[routed.key].is_bound:
                # Never longer than the request may live: a queue that cannot be bound must not hold it unacknowledged
                # without end.
                limit = partial(sleep_until, routed.deadline.at_ms + self._skew_ms, self._clock)
                with self._metrics.activation_seconds.time():
                    await self._queue_status.wait_bound(routed.key, limit=limit)
        except BrokerConflictError as error:
            return Refusal(Status.START_FAILED, str(error))
        except TimeoutError:
            return NOT_BOUND
        return None

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
            while not failures or not self._is_late(routed):
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
                    delay = FORWARD_RETRY.delay(failures)
                    self._log.warning("request not routed", key=routed.key, error=str(error), retry_in=delay)
                except BrokerSilentError as error:
                    # A queue that has lost its leader confirms nothing. Other keys are not affected.
                    maybe_delivered = True
                    failures += 1
                    delay = UNCONFIRMED_RETRY.delay(failures)
                    self._log.warning("request not confirmed", key=routed.key, error=str(error), retry_in=delay)
                # Requests behind this one would overtake it.
                ticket.hold_back()
                await self._clock.sleep(delay)
            return NOT_CONFIRMED
        return FAILED

    async def _send(self, orphan: Orphan, routed: RoutedRequest, *, maybe_delivered: bool) -> None:
        message = self._router.message(orphan, routed, maybe_delivered=maybe_delivered)
        # To the exchange and never to the queue: if the key is unbound meanwhile, the alternate exchange returns the
        # request (lifecycle: forward-to-exchange).
        exchange = self._router.exchange_for(routed)
        await self._publisher.publish(message, exchange=exchange, routing_key=routed.key, mandatory=True)

    def _is_late(self, routed: RoutedRequest) -> bool:
        return is_past(routed.deadline.at_ms, now_ms=now_ms(self._clock), skew_ms=self._skew_ms)

    async def _publish_and_acknowledge(
        self,
        orphan: Orphan,
        routed: Sequence[RoutedRequest],
        ticket: Ticket,
        copies: Sequence[asyncio.Task[Refusal | None]],
    ) -> None:
        """Publish the request, wait for its copies, and acknowledge it (lifecycle: ack-after-confirm)."""
        request, rest = routed[0], routed[1:]
        try:
            with ErrorBoundary(orphan.delivery, self._log) as boundary:
                # Copies are published at the same time; what the caller is answered depends on this one alone.
                refusal = await self._publish(orphan, request, ticket)
                if refusal is None:
                    self._metrics.forward_seconds.observe(self._clock.monotonic() - orphan.at)
                    self._router.count(self._router.forwarded, request)
                elif refusal is not FAILED:
                    await self._answer(orphan, refusal, request)
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
            self._release(routed)

    async def _refuse(self, orphan: Orphan, refusal: Refusal, routed: RoutedRequest | None = None) -> None:
        """Answer the request and acknowledge it. `routed`: None if it was refused before routing."""
        await self._answer(orphan, refusal, routed)
        # Crash before: the request returns and is answered a second time. After: it is gone, answered.
        await self._acknowledge(orphan.delivery)

    async def _answer(self, orphan: Orphan, refusal: Refusal, routed: RoutedRequest | None) -> None:
        # Crash before: the request returns, unanswered. After: it returns and is answered a second time.
        await self._replier.answer(orphan.request, refusal.status, refusal.detail, retry_after=refusal.retry_after)
        self._router.count(refusal.status.value, routed, again=orphan.delivery.redelivered)
        self._log.info("request refused", key=orphan.request.key, status=refusal.status.value, detail=refusal.detail)

    async def _acknowledge(self, delivery: Delivery) -> None:
        await delivery.ack()
        self._prefetch.finish(delivery)

    async def _dead_letter(self, delivery: Delivery) -> None:
        # Crash before: the request returns and fails again. After: it is in the dead letter queue alone.
        await to_dead_letters(delivery)
        self._prefetch.finish(delivery)
        self._router.count("failed")

    def _release(self, routed: Sequence[RoutedRequest]) -> None:
        for one in routed:
            self._tracker.release(one.key)
