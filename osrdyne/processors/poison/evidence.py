"""What is known of a request's failed deliveries: the deaths of workers that were running it.

RabbitMQ's count decides what is poison; this only tells a person who died of it. Asked by the dead letter responder.
"""

from __future__ import annotations

import asyncio

from osrdyne.aio.clock import Clock
from osrdyne.amqp import Delivery
from osrdyne.pool.state.crashes import DeathRegister, WorkerDeath
from osrdyne.pool.state.worker_reports import WorkerRegistry
from osrdyne.protocol.fingerprints import fingerprint
from osrdyne.protocol.messages import PATH_HEADER
from osrdyne.protocol.names import Key
from osrdyne.protocol.statuses import decode_text

PATIENCE = 3.0
"""Seconds to wait for the driver to notice what the broker has noticed already: that the last worker is dead."""


def fingerprint_of(delivery: Delivery) -> str:
    """The fingerprint that workers have used for this request."""
    properties = delivery.properties
    return fingerprint(
        key=delivery.routing_key,
        path=decode_text(delivery.headers.get(PATH_HEADER)) or "",
        correlation_id=properties.correlation_id,
        reply_to=properties.reply_to or None,
        message_id=properties.message_id,
        body=delivery.body,
    )


class EvidenceCollector:
    """Reads what this term has seen."""

    def __init__(self, *, registry: WorkerRegistry, deaths: DeathRegister, clock: Clock) -> None:
        self._registry = registry
        self._deaths = deaths
        self._clock = clock

    async def collect(self, delivery: Delivery) -> tuple[WorkerDeath, ...]:
        """The deaths that a dead letter was there for, the earliest first; waits a little for the last of them."""
        key, request = Key(delivery.routing_key), fingerprint_of(delivery)
        until = self._clock.monotonic() + PATIENCE
        while self._is_said_to_run(key, request) and (left := until - self._clock.monotonic()) > 0:
            await self._next_death(left)
        return self._deaths.of_request(key, request)

    def _is_said_to_run(self, key: Key, request: str) -> bool:
        return any(request in worker.requests for worker in self._registry.of_key(key))

    async def _next_death(self, seconds: float) -> None:
        death = asyncio.ensure_future(self._deaths.count.changed())
        timer = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait({death, timer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            death.cancel()
            timer.cancel()
