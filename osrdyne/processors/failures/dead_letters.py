"""The dead letter responder: answers dead letters with the reason why they were not served.

The status is RabbitMQ's latest death reason. A request that reached the delivery limit returns to its queue if it has
failed less often itself; else it is put into the poison inventory first, and so is a one-way request on which the
controller itself failed. Steps: poison entry with confirm → answer with confirm → acknowledge. A crash in between
repeats the steps before it: an answer may come twice with the same status, and none is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import NamedTuple

from osrdyne.aio.clock import Backoff, now_ms
from osrdyne.amqp import Delivery, Message
from osrdyne.amqp.consumer import Consumer
from osrdyne.broker.topology.policies import MAX_RETURNS
from osrdyne.errors import BrokerSilentError, PublishRefusedError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import Publisher
from osrdyne.pool.queues.topology_watch import TopologyWatch
from osrdyne.pool.routing.circuits import ActiveCircuits
from osrdyne.pool.state.observed import CIRCUIT, WorkerStatuses
from osrdyne.pool.state.workers.crashes import PoisonTexts
from osrdyne.processors.consumers import ErrorBoundary
from osrdyne.processors.expiry.plan import TakenRequest, copy_of
from osrdyne.processors.failures.poison_drop import PoisonDrops
from osrdyne.processors.forgeries import Forgeries
from osrdyne.processors.poison.entries import bare_entry, finding, poison_entry
from osrdyne.processors.poison.evidence import EvidenceCollector
from osrdyne.processors.prefetch import AdaptivePrefetch
from osrdyne.processors.replies import Replier, SetAside
from osrdyne.protocol.activity import text_fingerprint
from osrdyne.protocol.messages import FAILED_DELIVERIES_HEADER, PUT_BACKS_HEADER, ROUTE_HEADER, Request
from osrdyne.protocol.names import Key, PoolNames, priority_of
from osrdyne.protocol.statuses import Status, decode_text

RUNS_OF_POISON = 2  # Workers that a request must have ended before its text is refused.
MAX_PUT_BACKS = 20  # How often a request at its delivery limit returns to its queue.
POISON_RETRY = Backoff(initial=1.0, maximum=30.0)

_DETAILS: dict[str, str] = {
    Status.EXPIRED: "The request expired before a worker took it.",
    Status.DELIVERY_LIMIT: "The request was delivered {deliveries} times and no worker finished it; it is kept in the "
    "poison inventory. {finding}",
    Status.POISON: "The request has ended workers that ran it; it is kept in the poison inventory. {finding}",
    Status.REJECTED: "A consumer of the request queue rejected the request.",
    Status.MAXLEN: "The request queue was full, and RabbitMQ dropped the request.",
}
_REASONS = frozenset({Status.EXPIRED, Status.DELIVERY_LIMIT, Status.REJECTED, Status.MAXLEN})
_POISON = frozenset({Status.DELIVERY_LIMIT, Status.POISON})
_INTERRUPTED = (
    f"The terms of {MAX_RETURNS + 1} leaders ended while they held the request, before any worker had it; it is kept "
    "in the poison inventory."
)
_FAILED = "The controller failed on this request; its log shows why. Please report it."


class Death(NamedTuple):
    """Why and from which queue RabbitMQ removed a message, and when (seconds since the epoch, None: unknown).

    `expiration`: its property, which RabbitMQ has removed.
    """

    reason: Status
    queue: str
    at: int | None = None
    expiration: str | None = None


def last_death(headers: Mapping[str, object], names: PoolNames) -> Death | None:
    """The latest death in a queue of the pool; None for a message that was never dead-lettered.

    RabbitMQ puts its entry before those that a client has sent, and keeps an `x-first-death-reason` of a client. The
    end of a wait between two attempts, in a retry queue, is no death. Unknown reasons are ignored.
    """
    deaths = headers.get("x-death")
    for death in deaths if isinstance(deaths, list) else ():
        if not isinstance(death, dict):
            continue
        queue, reason = decode_text(death.get("queue")) or "", decode_text(death.get("reason"))
        if queue.startswith(f"{names.pool}-") and names.delay_of_retry_queue(queue) is None:
            at = int(time.timestamp()) if isinstance(time := death.get("time"), datetime) else None
            expiration = decode_text(death.get("original-expiration"))
            return Death(Status(reason), queue, at, expiration) if reason in _REASONS else None
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoisonRules:
    """How poison requests are treated. `limit_of`: the delivery limit of a key. `evidence`: the deaths of workers that
    explain a request. `texts`: what workers refuse. `drops`: sends copies."""

    limit_of: Callable[[Key], int]
    evidence: EvidenceCollector
    texts: PoisonTexts
    drops: PoisonDrops


class DeadLetterResponder:
    """Consumes `P-dl`."""

    def __init__(
        self,
        context: TermContext,
        *,
        publisher: Publisher,
        replier: Replier,
        forgeries: Forgeries,
        worker_status: WorkerStatuses,
        topology: TopologyWatch,
        circuits: ActiveCircuits,
        poison: PoisonRules,
    ) -> None:
        requests = context.settings.requests
        self._names, self._clock, self._metrics = context.names, context.clock, context.metrics
        self._publisher = publisher
        self._replier = replier
        self._forgeries = forgeries
        self._worker_status = worker_status
        self._topology = topology
        self._circuits = circuits
        self._poison = poison
        self._max_message_bytes = requests.max_message_bytes
        self._is_managed = context.settings.pool.is_managed
        self._began_at = int(context.clock.time())
        self._log: Logger = get_logger("dead_letters", pool=self._names.pool)

    async def run(self, consumer: Consumer) -> None:
        """Answer dead letters until the consumer ends; one that waits for the poison inventory holds up no others."""
        prefetch = AdaptivePrefetch(consumer, max_message_bytes=self._max_message_bytes, clock=self._clock)
        async with asyncio.TaskGroup() as group:
            adapting = group.create_task(prefetch.run(), name="prefetch of dead letters")
            async for delivery in consumer:
                # From here to the acknowledgement a crash returns the dead letter to its queue.
                prefetch.take(delivery)
                # Side by side: an entry that the poison queue does not confirm must not hold up the answers to others.
                group.create_task(self._process_one(delivery, prefetch), name="dead letter")
            adapting.cancel()

    async def _process_one(self, delivery: Delivery, prefetch: AdaptivePrefetch) -> None:
        set_aside = partial(prefetch.set_aside, delivery)
        with ErrorBoundary(delivery, self._log) as boundary:
            await self.process(delivery, set_aside=set_aside)
        if boundary.failed:
            # Never rejected: the dead letter queue has no dead letter exchange, and the message would be lost.
            await self._give_up(delivery, set_aside=set_aside)
        prefetch.finish(delivery)

    async def process(self, delivery: Delivery, *, set_aside: SetAside) -> None:
        """Answer one dead letter and acknowledge it. `set_aside` is called if its answer waits for its reply queue."""
        if self._forgeries.is_forged(delivery, self._names.dead_letter_exchange, queue="dead-letters"):
            await delivery.ack()
            return
        request = delivery.to_request(now_ms=now_ms(self._clock))
        death = last_death(delivery.headers, self._names)
        if death is None:
            self._metrics.invalid_messages.labels(queue="dead-letters").inc()
            self._log.warning("message has no x-death header", key=request.key)
            await self._replier.answer(
                request, Status.INVALID, "The message is not a dead letter.", set_aside=set_aside
            )
            await delivery.ack()
            return
        reason = death.reason
        if reason is Status.DELIVERY_LIMIT and await self._put_back(delivery, request, death):
            # Crash before: the copy runs, and the next leader, which has no evidence, answers the dead letter. After:
            # the queue alone has the request.
            await delivery.ack()
            return
        # A worker rejects a suspect with a refused text, and RabbitMQ gives the same reason as for other rejects: only
        # the text distinguishes them.
        if reason is Status.REJECTED and self._is_poison(request, death):
            reason = Status.POISON
        # Crash before: the dead letter returns. After its poison entry is confirmed: it returns and is entered twice.
        detail = await self._explain(delivery, request, reason, death)
        # Crash after: the dead letter returns and is answered a second time, with the same status.
        await self._replier.answer(request, reason, detail, set_aside=set_aside)
        await delivery.ack()
        # A boundary of its own: the dead letter is answered, and an error here must not answer it once more.
        with ErrorBoundary(delivery, self._log):
            self._note_answered(delivery, request, reason, death)

    async def _put_back(self, delivery: Delivery, request: Request, death: Death) -> bool:
        """Return a request at RabbitMQ's limit to its queue if it has failed less often itself. False if it has not, or
        if no queue takes it.

        The copy has the number of its own failures. It is a suspect, so that workers report it before it runs.
        """
        if self._died_as_orphan(death):
            return False
        evidence, limit = self._poison.evidence, self._poison.limit_of(Key(request.key))
        await evidence.settle(delivery, also_waiting=True)
        before, put_backs = request.failed_before, request.put_backs
        known = evidence.take_failed(delivery)
        failed = max(1, before + max(known.caused, limit - known.innocent))
        if failed >= limit and not before and self._was_not_seen(delivery, death):
            failed = limit - 1  # one round more, in which each delivery counts that this leader cannot explain
        if failed >= limit or put_backs >= MAX_PUT_BACKS:
            return False
        copy = copy_of(TakenRequest(delivery, request), now_ms=now_ms(self._clock))
        # As its client has published it: from the timestamp on, if it has one.
        expiration = death.expiration if request.deadline_ms is None else copy.expiration
        counts = {FAILED_DELIVERIES_HEADER: failed, PUT_BACKS_HEADER: put_backs + 1}
        names, priority = self._names, priority_of(death.queue)
        try:
            # Crash before: the dead letter returns, and the next leader, which has no evidence, answers it.
            await self._publisher.publish(
                replace(copy, headers={**copy.headers, **counts}, expiration=expiration),
                # Never to the queue itself: if its group has ended, the request becomes an orphan and starts it again.
                exchange=names.work_exchange(priority) if self._is_managed else names.requests_exchange,
                routing_key=request.key,
                mandatory=True,
            )
        except (PublishRefusedError, BrokerSilentError) as error:
            self._log.warning("request not put back", key=request.key, error=str(error))
            return False
        self._metrics.put_back.inc()
        self._log.info("request put back, its deliveries failed for other reasons", key=request.key, failed=failed)
        return True

    def _was_not_seen(self, delivery: Delivery, death: Death) -> bool:
        """Whether its deliveries failed before this term, and no leader with the evidence has had its dead letter."""
        return death.at is not None and death.at < self._began_at and not delivery.redelivered

    def _note_answered(self, delivery: Delivery, request: Request, reason: Status, death: Death) -> None:
        """Count an answered dead letter, and send a copy of a poison request."""
        # What the controller rejected before any worker had it says nothing about the backend of a route.
        if self._circuits.counts and not self._died_as_orphan(death):
            route = decode_text(delivery.headers.get(ROUTE_HEADER)) or None
            self._circuits.record(route, Key(request.key), [delivery.fingerprint()], status=reason.value, code=None)
        if reason in _POISON:
            # Crash before: the copy is not sent. It is sent once, and the inventory has the request in any case.
            limit = MAX_RETURNS + 1 if self._died_as_orphan(death) else self._poison.limit_of(Key(request.key))
            self._poison.drops.submit(Key(request.key), delivery, reason=reason, deliveries=limit)
        self._metrics.dead_letters.labels(reason=reason.value, **self._labels(delivery, death)).inc()
        self._log.info("dead letter answered", key=request.key, status=reason.value)

    def _labels(self, delivery: Delivery, death: Death) -> dict[str, str]:
        """The labels of the route and priority level of the request."""
        return self._metrics.of_route(decode_text(delivery.headers.get(ROUTE_HEADER)), priority_of(death.queue))

    async def _explain(self, delivery: Delivery, request: Request, reason: Status, death: Death) -> str:
        """The detail of the answer; a request that must be kept is in the inventory when this returns."""
        if reason is Status.DELIVERY_LIMIT and self._died_as_orphan(death):
            # No worker had it, so no death of one explains it.
            now = now_ms(self._clock)
            await self._keep(poison_entry(delivery, reason=reason, deliveries=MAX_RETURNS + 1, now_ms=now))
            return _INTERRUPTED
        if reason in _POISON:
            return await self._keep_poison(delivery, reason)
        if reason is Status.REJECTED and self._died_as_orphan(death):
            if request.reply_to is None:
                # A one-way request has no caller that could be answered: the entry is its only trace.
                await self._keep(poison_entry(delivery, reason=reason, deliveries=0, now_ms=now_ms(self._clock)))
            return _FAILED
        return _DETAILS[reason] + self._waiting(request.key, reason)

    def _died_as_orphan(self, death: Death) -> bool:
        """Whether the controller rejected it, before any worker had it."""
        return death.queue == self._names.orphan_queue

    def _is_poison(self, request: Request, death: Death) -> bool:
        """Whether a worker rejected it because its text ends workers."""
        if self._died_as_orphan(death):
            return False
        # The texts of this term only: after a take-over such a request is answered `rejected`.
        return text_fingerprint(request.path, request.body) in self._poison.texts.of_key(Key(request.key))

    def _waiting(self, key: str, reason: Status) -> str:
        waiting_for = self._worker_status[Key(key)].waiting_for
        if reason is not Status.EXPIRED or waiting_for is None:
            return ""
        if waiting_for == CIRCUIT:
            return " Its group was paused because a circuit was open."
        return f" Its group was still waiting to be started ({waiting_for})."

    async def _keep_poison(self, delivery: Delivery, reason: Status) -> str:
        """Put the request into the poison inventory; when that is confirmed, return the detail of the answer."""
        # May wait a few seconds for the report of the last death; the dead letter stays unacknowledged meanwhile.
        if reason is Status.POISON:
            await self._poison.evidence.settle(delivery)
        deaths = self._poison.evidence.deaths(delivery)
        # RabbitMQ 3.10 drops the count when it dead-letters.
        limit = self._poison.limit_of(Key(delivery.routing_key))
        # A worker rejects it after two runs: the third delivery was the last.
        deliveries = max(len(deaths), limit if reason is Status.DELIVERY_LIMIT else RUNS_OF_POISON)
        now = now_ms(self._clock)
        await self._keep(poison_entry(delivery, reason=reason, deliveries=deliveries, now_ms=now, deaths=deaths))
        return _DETAILS[reason].format(deliveries=deliveries, finding=finding(deliveries, deaths))

    async def _keep(self, entry: Message) -> None:
        failures = 0
        while True:
            try:
                # Mandatory: a missing poison queue is an error here, and not a lost request.
                await self._publisher.publish(
                    entry, exchange=self._names.poison_exchange, routing_key=self._names.poison_queue, mandatory=True
                )
                return
            except (PublishRefusedError, BrokerSilentError) as error:
                failures += 1
                # The poison queue or its binding may be missing; the topology watch declares it again.
                self._topology.check_soon()
                self._log.warning("poison entry not stored", error=str(error))
                await self._clock.sleep(POISON_RETRY.delay(failures))

    async def _give_up(self, delivery: Delivery, *, set_aside: SetAside) -> None:
        """Keep and answer a dead letter that cannot be processed, without its headers."""
        # Crash after it: the dead letter returns, and is kept and answered a second time.
        await self._keep(bare_entry(delivery, reason=Status.REJECTED, now_ms=now_ms(self._clock)))
        properties = delivery.properties
        request = Request(
            delivery.routing_key, b"", correlation_id=properties.correlation_id, reply_to=properties.reply_to
        )
        await self._replier.answer(request, Status.REJECTED, _FAILED, set_aside=set_aside)
        await delivery.ack()
        self._metrics.invalid_messages.labels(queue="dead-letters").inc()
