"""The orphan processor: requests whose key has no binding. It has their group made ready and forwards them.

Nothing waits in it longer than a bind, which itself waits for a stop of the group that is under way (lifecycle:
bind-waits-for-stop),
nor longer than a request may live; per-key order is kept, keys go side by side. Steps per orphan, and what a crash in
between leaves: hold the key and require it → wait until it is bound → publish to the request exchange with confirm
(crash after it: the orphan is redelivered, the request arrives twice) → acknowledge → release. A crash anywhere before
the acknowledgement leaves the orphan in its queue (lifecycle: "Activation and forwarding"). An orphan that fails for a
reason nobody foresaw
becomes a dead letter, in one step of the broker's.
"""

from __future__ import annotations

import asyncio
from functools import partial

from osrdyne.aio.clock import Clock, now_ms, sleep_until
from osrdyne.aio.tasks import KeyedJobs
from osrdyne.amqp import Delivery
from osrdyne.amqp.consumer import Consumer
from osrdyne.errors import InvalidKeyError
from osrdyne.logs import Logger, get_logger
from osrdyne.metrics import Metrics
from osrdyne.pool.ports import Publisher
from osrdyne.pool.state.admission import Admission, Verdict
from osrdyne.pool.state.observed import QueueStatuses
from osrdyne.pool.state.tracker import PoolStateTracker
from osrdyne.processors.error_boundary import contained, to_dead_letters
from osrdyne.processors.forgeries import Forgeries
from osrdyne.processors.prefetch import Window
from osrdyne.processors.replies import Replier
from osrdyne.processors.requests.delivery import deliver
from osrdyne.processors.requests.forwarding import Doubt, Refusal, forwarded, hops_of, refuse_for, refuse_orphan
from osrdyne.protocol.deadlines import is_past
from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key, PoolNames, parse_key
from osrdyne.protocol.statuses import Status


class OrphanProcessor:
    """Consumes `P-orphan`."""

    def __init__(
        self,
        *,
        names: PoolNames,
        tracker: PoolStateTracker,
        board: QueueStatuses,
        admission: Admission,
        doubt: Doubt,
        publisher: Publisher,
        replier: Replier,
        forgeries: Forgeries,
        ttl: float,
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
        self._publisher = publisher
        self._replier = replier
        self._forgeries = forgeries
        self._ttl_ms = int(ttl * 1000)
        self._skew_ms = int(max_clock_skew * 1000)
        self._max_message_bytes = max_message_bytes
        self._clock = clock
        self._metrics = metrics
        self._log: Logger = get_logger("orphans")

    async def run(self, consumer: Consumer) -> None:
        """Process orphans until the consumer ends; then finish what has been taken."""
        window = Window(consumer, max_message_bytes=self._max_message_bytes, clock=self._clock)
        async with asyncio.TaskGroup() as group:
            growing = group.create_task(window.run(), name="window of orphans")
            jobs: KeyedJobs[str] = KeyedJobs(group, "orphans of")
            async for delivery in consumer:
                window.take(delivery)
                arrived_at = self._clock.monotonic()
                jobs.submit(delivery.routing_key, partial(self._process_one, delivery, window, arrived_at))
            growing.cancel()

    async def _process_one(self, delivery: Delivery, window: Window, arrived_at: float) -> None:
        process = partial(self.process, arrived_at=arrived_at)
        await contained(process, delivery, otherwise=self._give_up, log=self._log)
        window.finish(delivery)

    async def _give_up(self, delivery: Delivery) -> None:
        await to_dead_letters(delivery)
        self._metrics.orphans.labels(outcome="failed").inc()

    async def process(self, delivery: Delivery, *, arrived_at: float) -> None:
        """One orphan, to its end: forwarded or answered, and acknowledged. `arrived_at`: monotonic."""
        if self._forgeries.is_forged_orphan(delivery):
            await delivery.ack()
            return
        request = delivery.to_request(now_ms=now_ms(self._clock))
        if self._forgeries.refuses_reply_to(request, component="orphans"):
            await delivery.ack()
            self._metrics.orphans.labels(outcome="reply-to-refused").inc()
            return
        try:
            key = parse_key(request.key)
        except InvalidKeyError as error:
            await self._refuse(delivery, request, Refusal(Status.INVALID, str(error)))
            return
        known = self._tracker.status(key) is not None
        refusal = refuse_orphan(request, known=known, now_ms=now_ms(self._clock), skew_ms=self._skew_ms)
        if refusal is None and not known:
            refusal = refuse_for(self._ask_for_place(key))
        if refusal is not None:
            await self._refuse(delivery, request, refusal)
            return
        if hops_of(request):
            # It was forwarded when the key was bound, and came back: the queue or its binding may be gone.
            self._doubt(key, since=arrived_at)
        self._tracker.hold(key)
        try:
            await self._forward(delivery, request, key)
        finally:
            self._tracker.release(key)

    def _ask_for_place(self, key: Key) -> Verdict:
        verdict = self._admission.request(key)
        if self._admission.census.take_warning():
            self._log.warning("nearly max_distinct_keys keys were used", keys=len(self._admission.census))
        return verdict

    async def _forward(self, delivery: Delivery, request: Request, key: Key) -> None:
        started = self._clock.monotonic()
        until_ms = self._until_ms(request)
        attempt = partial(self._attempt, delivery, request, key, until_ms)
        is_late = partial(self._is_late, until_ms)
        refusal = await deliver(attempt, key=key, is_late=is_late, clock=self._clock, log=self._log)
        if refusal is not None:
            await self._refuse(delivery, request, refusal)
            return
        await delivery.ack()
        self._metrics.orphans.labels(outcome="forwarded").inc()
        self._metrics.forward_seconds.observe(self._clock.monotonic() - started)

    def _until_ms(self, request: Request) -> int:
        """How long it may be held: until its deadline, or else as long as it may wait in a request queue."""
        return now_ms(self._clock) + self._ttl_ms if request.deadline_ms is None else request.deadline_ms

    def _is_late(self, until_ms: int) -> bool:
        return is_past(until_ms, now_ms=now_ms(self._clock), skew_ms=self._skew_ms)

    async def _attempt(self, delivery: Delivery, request: Request, key: Key, until_ms: int) -> None:
        self._tracker.require_worker_group(key)
        await self._wait_bound(key, until_ms)
        await self._publish(delivery, request, key)

    async def _wait_bound(self, key: Key, until_ms: int) -> None:
        if not self._board[key].is_bound:
            with self._metrics.activation_seconds.time():
                await self._board.wait_bound(key, limit=partial(sleep_until, until_ms + self._skew_ms, self._clock))

    async def _publish(self, delivery: Delivery, request: Request, key: Key) -> None:
        message = forwarded(delivery, request, now_ms=now_ms(self._clock), skew_ms=self._skew_ms)
        # To the exchange and never to the queue: unbound meanwhile, the alternate exchange takes it back (14).
        await self._publisher.publish(message, exchange=self._names.requests_exchange, routing_key=key, mandatory=True)

    async def _refuse(self, delivery: Delivery, request: Request, refusal: Refusal) -> None:
        await self._replier.answer(request, refusal.status, refusal.detail, retry_after=refusal.retry_after)
        await delivery.ack()
        self._metrics.orphans.labels(outcome=refusal.status.value).inc()
        self._log.info("orphan refused", key=request.key, status=refusal.status.value, detail=refusal.detail)
