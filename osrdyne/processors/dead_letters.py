"""The dead letter responder: tells callers why their request was not served.

The status is RabbitMQ's first death reason. What reached the delivery limit goes to the poison inventory first. Steps:
poison entry with confirm → answer with confirm → acknowledge; a crash in between repeats the steps before it, so that
an answer may come twice with the same status, and none is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from osrdyne.aio.backoff import Backoff
from osrdyne.aio.clock import Clock, now_ms
from osrdyne.amqp import Delivery
from osrdyne.amqp.consumer import Consumer
from osrdyne.errors import BrokerSilentError, PublishRefusedError
from osrdyne.logs import Logger, get_logger
from osrdyne.metrics import Metrics
from osrdyne.pool.facts import WorkerBoard
from osrdyne.pool.roles import Publisher
from osrdyne.processors.evidence import EvidenceCollector
from osrdyne.processors.poison import finding, poison_entry
from osrdyne.processors.replies import Replier
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.statuses import Status, decode_text

PREFETCH = 64
POISON_RETRY = Backoff(initial=1.0, maximum=30.0)

_DETAILS: dict[str, str] = {
    Status.EXPIRED: "The time of the request ran out before a worker took it.",
    Status.DELIVERY_LIMIT: "The request was given to workers {deliveries} times and none finished it; it is kept in "
    "the poison inventory. {finding}",
    Status.REJECTED: "A worker refused the request for good.",
    Status.MAXLEN: "The request queue was full, and the request had to make room.",
}


def death_reason(headers: Mapping[str, object]) -> Status | None:
    """RabbitMQ's first death reason; None for a message that was never dead-lettered.

    Only the reasons that RabbitMQ knows: anybody may send a message to the dead letter exchange.
    """
    reason = decode_text(headers.get("x-first-death-reason"))
    deaths = headers.get("x-death")
    if reason is None and isinstance(deaths, list) and deaths and isinstance(deaths[-1], dict):
        reason = decode_text(deaths[-1].get("reason"))
    return Status(reason) if reason in _DETAILS else None


class DeadLetterResponder:
    """Consumes `P-dl`."""

    def __init__(
        self,
        *,
        names: PoolNames,
        publisher: Publisher,
        replier: Replier,
        workers: WorkerBoard,
        evidence: EvidenceCollector,
        delivery_limit: int,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._names = names
        self._publisher = publisher
        self._replier = replier
        self._workers = workers
        self._evidence = evidence
        self._deliveries = (
            delivery_limit + 1
        )  # RabbitMQ forgets the count on the way (3.10), and a limit of N allows N+1
        self._clock = clock
        self._metrics = metrics
        self._log: Logger = get_logger("dead_letters")

    async def run(self, consumer: Consumer) -> None:
        """Answer dead letters until the consumer ends; the prefetch bounds how many at once."""
        async with asyncio.TaskGroup() as group:
            async for delivery in consumer:
                group.create_task(self.process(delivery), name="dead letter")

    async def process(self, delivery: Delivery) -> None:
        """One dead letter, to its end."""
        request = delivery.to_request(now_ms=now_ms(self._clock))
        reason = death_reason(delivery.headers)
        if reason is None:
            self._metrics.invalid_messages.labels(queue="dead-letters").inc()
            self._log.warning("message in the dead letter queue that did not die", key=request.key)
            await self._replier.answer(request, Status.INVALID, "The message is not a dead letter.")
            await delivery.ack()
            return
        detail = await self._keep(delivery) if reason is Status.DELIVERY_LIMIT else _DETAILS[reason]
        await self._replier.answer(request, reason, detail + self._waiting(request.key, reason))
        await delivery.ack()
        self._metrics.dead_letters.labels(reason=reason.value).inc()
        self._log.info("dead letter answered", key=request.key, status=reason.value)

    def _waiting(self, key: str, reason: Status) -> str:
        waiting_for = self._workers[Key(key)].waiting_for
        if reason is not Status.EXPIRED or waiting_for is None:
            return ""
        return f" Its group was still waiting to be started ({waiting_for})."

    async def _keep(self, delivery: Delivery) -> str:
        """Put the request into the poison inventory; only when it is there, return what to tell the caller."""
        deaths = await self._evidence.collect(delivery)
        entry = poison_entry(delivery, deliveries=self._deliveries, now_ms=now_ms(self._clock), deaths=deaths)
        failures = 0
        while True:
            try:
                await self._publisher.publish(entry, exchange="", routing_key=self._names.poison_queue, mandatory=True)
                return _DETAILS[Status.DELIVERY_LIMIT].format(
                    deliveries=self._deliveries, finding=finding(self._deliveries, deaths)
                )
            except (PublishRefusedError, BrokerSilentError) as error:
                failures += 1
                self._log.error("poison inventory does not take a request, trying again", error=str(error))
                await self._clock.sleep(POISON_RETRY.delay(failures))
