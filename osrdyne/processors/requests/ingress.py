"""The ingress of a managed pool: every request comes here, is accepted or answered, and goes on in its class.

It consumes `P-orphan`, as the orphan processor of a direct pool does, and keeps the same promises: nothing waits in it
longer than a bind, a request is acknowledged only when all of its deliveries are confirmed or its caller is answered,
and a crash in between brings it back (lifecycle: "Activation and forwarding"). Requests of one key are published in
their order, without
waiting for each other's confirm. What comes back from a work exchange (its group was unbound under way) was accepted
before: it keeps group, class and deadline.

The splitter is asked as soon as a request is taken, so that the groups of one key do not wait for each other.
"""

from __future__ import annotations

import asyncio
from functools import partial

from osrdyne.aio.clock import Clock, now_ms, sleep_until
from osrdyne.aio.tasks import KeyedJobs
from osrdyne.amqp import Delivery
from osrdyne.amqp.consumer import Consumer
from osrdyne.errors import BrokerConflictError, BrokerError, BrokerSilentError, InvalidKeyError, PublishRefusedError
from osrdyne.ingress.acceptance import RoutedRequest, accept
from osrdyne.ingress.requests import Arrival
from osrdyne.ingress.splitter.rules import split_arrival
from osrdyne.logs import Logger, get_logger
from osrdyne.metrics import Metrics
from osrdyne.pool.ports import Publisher
from osrdyne.pool.routing.routes import ActiveRoutes
from osrdyne.pool.routing.splitter import ActiveSplitter
from osrdyne.pool.state.admission import Admission
from osrdyne.pool.state.backlog import PriorityBacklog
from osrdyne.pool.state.observed import QueueStatuses
from osrdyne.pool.state.tracker import PoolStateTracker
from osrdyne.processors.error_boundary import contained, to_dead_letters
from osrdyne.processors.expiry.sweeper import QueueCleaner
from osrdyne.processors.forgeries import Forgeries
from osrdyne.processors.prefetch import Window
from osrdyne.processors.publish_order import Lanes, Place
from osrdyne.processors.replies import Replier
from osrdyne.processors.requests.cancellations import KeptCancels
from osrdyne.processors.requests.delivery import NOT_BOUND, deliver
from osrdyne.processors.requests.forwarding import (
    Doubt,
    Refusal,
    arrival_of,
    hops_of,
    passed_on,
    refuse_for,
    refuse_orphan,
    routed_again,
    was_accepted,
)
from osrdyne.protocol.deadlines import is_past
from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.statuses import Status

ACCEPTED = "accepted"
COPY_DROPPED = "copy-dropped"
"""Outcome of a one-way copy whose group has no place, or cannot be had: the request itself goes on."""
FAILED = Refusal(Status.REJECTED, "The request could not be passed on, by a fault of the controller.")
"""What nobody foresaw: the request becomes a dead letter, which the dead letter responder answers, or keeps."""
CANCELLED = Refusal(Status.CANCELLED, "The caller cancelled the request.")
WORK_LIMIT_LOG_INTERVAL = 60.0
"""Seconds between two warnings about conditions that reach their work limit."""
NO_ROUTE = Refusal(Status.NO_ROUTE, "None of the routes of this pool fits it; `osrdyne explain` says why.")


class IngressProcessor:
    """Consumes `P-orphan` of a managed pool."""

    def __init__(
        self,
        *,
        names: PoolNames,
        tracker: PoolStateTracker,
        board: QueueStatuses,
        admission: Admission,
        doubt: Doubt,
        backlog: PriorityBacklog,
        routing: ActiveRoutes,
        splitting: ActiveSplitter,
        lanes: Lanes,
        cleaner: QueueCleaner | None,
        cancels: KeptCancels,
        publisher: Publisher,
        replier: Replier,
        forgeries: Forgeries,
        max_clock_skew: float,
        max_message_bytes: int,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._names = names
        self._tracker = tracker
        self._board = board
        self._admission = admission
        self._doubt = doubt
        self._backlog = backlog
        self._routing = routing
        self._splitting = splitting
        self._publisher = publisher
        self._replier = replier
        self._forgeries = forgeries
        self._skew_ms = int(max_clock_skew * 1000)
        self._max_message_bytes = max_message_bytes
        self._clock = clock
        self._metrics = metrics
        self._window: Window
        self._lanes = lanes
        self._cleaner = cleaner
        self._cancels = cancels
        self._work_limit_logged = -WORK_LIMIT_LOG_INTERVAL
        self._log: Logger = get_logger("ingress")

    async def run(self, consumer: Consumer) -> None:
        """Process requests until the consumer ends; then finish what has been taken."""
        window = self._window = Window(consumer, max_message_bytes=self._max_message_bytes, clock=self._clock)
        async with asyncio.TaskGroup() as group:
            growing = group.create_task(window.run(), name="window of requests")
            if self._cleaner is not None:
                group.create_task(self._cleaner.run(), name="queue cleaner")
            jobs: KeyedJobs[str] = KeyedJobs(group, "requests of")
            async for delivery in consumer:
                window.take(delivery)
                if self._forgeries.is_forged_orphan(delivery):
                    await self._done(delivery)
                    continue
                try:
                    arrival = self._split(delivery, arrival_of(delivery, now_ms=now_ms(self._clock)))
                except Exception:  # as in `contained`: the end of this request, and not of the term
                    self._log.exception("request that cannot be split", key=delivery.routing_key)
                    jobs.submit(delivery.routing_key, partial(self._give_up, delivery))
                    continue
                begin = partial(self._begin, group, arrival, self._clock.monotonic())
                jobs.submit(
                    arrival.request.key,
                    partial(contained, begin, delivery, otherwise=self._give_up, log=self._log),
                )
            growing.cancel()
            if self._cleaner is not None:
                self._cleaner.finish()

    def _split(self, delivery: Delivery, arrival: Arrival) -> Arrival:
        """The request with the key of the group that it is for; one that is refused anyway takes no turn."""
        splitter = self._splitting.splitter
        if splitter is None or was_accepted(delivery, self._names):
            return arrival
        if self._refusal(arrival, known=True) is not None:
            return arrival
        split = splitter.split(arrival)
        if split.rule is not None:
            outcome = "split" if split.unchanged is None else "unchanged"
            self._metrics.splits.labels(rule=split.rule, outcome=outcome).inc()
        return split_arrival(arrival, split)

    async def _begin(self, group: asyncio.TaskGroup, arrival: Arrival, arrived_at: float, delivery: Delivery) -> None:
        """Decide, and wait until every group is bound; then publish beside the next request of the key."""
        request = arrival.request
        if self._forgeries.refuses_reply_to(request, component="ingress"):
            await self._done(delivery)
            self._count(None, "reply-to-refused")
            return
        decision = self._decide(delivery, arrival)
        if isinstance(decision, Refusal):
            await self._refuse(delivery, request, decision)
            return
        passages = await self._admit(delivery, request, decision)
        for passage in passages:
            if hops_of(request):
                # It was passed on when the group was bound, and came back: the queue or its binding may be gone.
                self._doubt(passage.key, since=arrived_at)
            self._tracker.hold(passage.key)
            self._tracker.require_worker_group(passage.key)  # or its place under `max_groups` would never be free
        if passages:
            await self._start(delivery, request, passages, group)

    def _decide(self, delivery: Delivery, arrival: Arrival) -> list[RoutedRequest] | Refusal:
        request, limits = arrival.request, self._routing.ttl_limits
        refusal = self._refusal(arrival, known=self._tracker.status(Key(request.key)) is not None)
        if refusal is not None and not (delivery.redelivered and refusal.status is Status.EXPIRED):
            return refusal
        again = routed_again(delivery, request, self._names, pool_ttl=limits.default, now_ms=arrival.accepted_ms)
        if again is None:
            self._cancels.forget(request)
        elif self._cancels.was_cancelled(request):
            return CANCELLED
        passages = [again] if again else accept(arrival, self._routing.table, limits=limits)
        if again is None and self._routing.table is not None and arrival.sample.exceeded:
            self._note_work_limit(arrival)
        # What was perhaps answered no-route before it was delivered again, and expired meanwhile, gets the same answer.
        return refusal or passages if passages else NO_ROUTE

    def _note_work_limit(self, arrival: Arrival) -> None:
        """Count conditions that were given up for this request, and warn now and then."""
        self._metrics.conditions_limited.inc(arrival.sample.exceeded)
        if self._clock.monotonic() - self._work_limit_logged >= WORK_LIMIT_LOG_INTERVAL:
            self._work_limit_logged = self._clock.monotonic()
            self._log.warning(
                "conditions reach their work limit and are undefined",
                key=arrival.request.key,
                conditions=arrival.sample.exceeded,
                body_bytes=len(arrival.request.body),
            )

    def _refusal(self, arrival: Arrival, *, known: bool) -> Refusal | None:
        """Why the request goes nowhere, whatever the routes say. `known`: its group is up, or on its way up."""
        try:
            arrival.check_key()
        except InvalidKeyError as error:
            return Refusal(Status.INVALID, str(error))
        return refuse_orphan(arrival.request, known=known, now_ms=now_ms(self._clock), skew_ms=self._skew_ms)

    async def _admit(self, delivery: Delivery, request: Request, passages: list[RoutedRequest]) -> list[RoutedRequest]:
        """The passages whose groups have a place; the caller is told when that of the answer has none."""
        admitted = []
        for passage in passages:
            known = self._tracker.status(passage.key) is not None
            refusal = None if known else refuse_for(self._admission.request(passage.key))
            if refusal is None:
                admitted.append(passage)
            elif passage.keeps_reply:
                await self._refuse(delivery, request, refusal, passage)
                return []
            else:
                self._count(passage, COPY_DROPPED)
        return admitted

    async def _start(
        self, delivery: Delivery, request: Request, passages: list[RoutedRequest], group: asyncio.TaskGroup
    ) -> None:
        """Wait for the groups in the order of the key's requests; what follows the write needs no order."""
        held = list(passages)
        try:
            refused = [(passage, refusal) for passage in passages if (refusal := await self._wait_or_refuse(passage))]
        except BaseException:
            self._release(held)
            raise
        for passage, refusal in refused:
            if passage.keeps_reply:
                self._release(held)
                await self._refuse(delivery, request, refusal, passage)
                return
            held.remove(passage)
            self._release([passage])
            self._count(passage, COPY_DROPPED)
        # Tasks begin in the order in which they are made, so that messages are written in that order, too.
        attempts = []
        for passage in held:
            place = self._lanes.enter(passage.key, passage.priority)
            passing = self._pass_on(delivery, request, passage, place)
            attempts.append(group.create_task(passing, name=f"request of {request.key!r}"))
        group.create_task(self._finish(delivery, request, held, attempts), name=f"end of {request.key!r}")

    def _release(self, passages: list[RoutedRequest]) -> None:
        for passage in passages:
            self._tracker.release(passage.key)

    async def _wait_or_refuse(self, passage: RoutedRequest) -> Refusal | None:
        """Wait until the group of the passage is bound; why it cannot be."""
        try:
            await self._wait_bound(passage)
        except BrokerConflictError as error:
            return Refusal(Status.START_FAILED, str(error))
        except TimeoutError:
            return NOT_BOUND
        return None

    async def _wait_bound(self, passage: RoutedRequest) -> None:
        self._tracker.require_worker_group(passage.key)
        await self._routing.require_level(passage.priority)
        if not self._board[passage.key].is_bound:
            with self._metrics.activation_seconds.time():
                until_ms = passage.deadline.at_ms + self._skew_ms
                await self._board.wait_bound(passage.key, limit=partial(sleep_until, until_ms, self._clock))

    async def _finish(
        self,
        delivery: Delivery,
        request: Request,
        passages: list[RoutedRequest],
        attempts: list[asyncio.Task[Refusal | None]],
    ) -> None:
        """Acknowledge the request when all of its passages are confirmed, or refused."""
        started, end = self._clock.monotonic(), self._done
        try:
            for passage, attempt in zip(passages, attempts, strict=True):
                refusal = await attempt
                if passage.keeps_reply and refusal is FAILED:
                    end = self._give_up
                elif passage.keeps_reply and refusal is not None:
                    await self._replier.answer(request, refusal.status, refusal.detail)
                if refusal is None:
                    self._backlog.note(passage.key, passage.priority, started)
                self._count(passage, ACCEPTED if refusal is None else refusal.status.value)
            await end(delivery)
        finally:
            self._release(passages)
        self._metrics.forward_seconds.observe(self._clock.monotonic() - started)

    async def _pass_on(
        self, delivery: Delivery, request: Request, passage: RoutedRequest, place: Place
    ) -> Refusal | None:
        """Publish until it is confirmed; a refusal that no further try changes."""
        perhaps_there = delivery.redelivered

        async def attempt() -> None:
            nonlocal perhaps_there
            await place.turn()
            await self._wait_bound(passage)
            try:
                await self._publish(delivery, request, passage, perhaps_there=perhaps_there)
            except (BrokerSilentError, PublishRefusedError) as error:
                perhaps_there |= isinstance(error, BrokerSilentError)
                place.hold_back()
                raise
            if self._cleaner is not None:
                self._cleaner.deadlines.note((passage.key, passage.priority), passage.deadline.at_ms)

        with place:
            try:
                is_late = partial(self._is_late, passage)
                return await deliver(attempt, key=passage.key, is_late=is_late, clock=self._clock, log=self._log)
            except BrokerError:
                raise
            except Exception:  # or it would end this term and, as it comes back, each one that follows
                self._log.exception("request that cannot be passed on", key=passage.key)
                return FAILED

    def _is_late(self, passage: RoutedRequest) -> bool:
        return is_past(passage.deadline.at_ms, now_ms=now_ms(self._clock), skew_ms=self._skew_ms)

    async def _publish(
        self, delivery: Delivery, request: Request, passage: RoutedRequest, *, perhaps_there: bool
    ) -> None:
        now, skew = now_ms(self._clock), self._skew_ms
        message = passed_on(delivery, request, passage, perhaps_there=perhaps_there, now_ms=now, skew_ms=skew)
        # To the exchange and never to the queue: unbound meanwhile, the alternate exchange takes it back (14).
        exchange = self._names.work_exchange(passage.priority)
        await self._publisher.publish(message, exchange=exchange, routing_key=passage.key, mandatory=True)

    async def _refuse(
        self, delivery: Delivery, request: Request, refusal: Refusal, passage: RoutedRequest | None = None
    ) -> None:
        await self._replier.answer(request, refusal.status, refusal.detail, retry_after=refusal.retry_after)
        await self._done(delivery)
        self._count(passage, refusal.status.value)
        if delivery.redelivered:
            self._metrics.refused_again.inc()
        self._log.info("request refused", key=request.key, status=refusal.status.value, detail=refusal.detail)

    async def _give_up(self, delivery: Delivery) -> None:
        await to_dead_letters(delivery)
        self._window.finish(delivery)
        self._count(None, "failed")

    async def _done(self, delivery: Delivery) -> None:
        await delivery.ack()
        self._window.finish(delivery)

    def _count(self, passage: RoutedRequest | None, outcome: str) -> None:
        """`passage` None: it is not known yet which way the request would have taken."""
        labels = {"route": "", "priority": ""} if passage is None else self._labels(passage)
        self._metrics.ingress.labels(outcome=outcome, **labels).inc()

    def _labels(self, passage: RoutedRequest) -> dict[str, str]:
        return self._metrics.of_route(passage.route, passage.priority)
