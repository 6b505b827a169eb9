"""The evidence on a request's failed deliveries: the deaths of workers that were running it.

RabbitMQ's delivery count decides which request is poison; the evidence only explains it to an operator. Collected by
the dead letter responder.
"""

from __future__ import annotations

import asyncio

from osrdyne.amqp import Delivery
from osrdyne.pool.context import TermContext
from osrdyne.pool.state.workers.crashes import DeathRegister
from osrdyne.pool.state.workers.worker_reports import WorkerRegistry
from osrdyne.protocol.activity import fingerprint
from osrdyne.protocol.messages import PATH_HEADER
from osrdyne.protocol.names import Key
from osrdyne.protocol.poison import WorkerDeath
from osrdyne.protocol.statuses import decode_text

# Seconds to wait for the driver to report the last worker's death, which RabbitMQ has already noticed.
PATIENCE = 3.0


def fingerprint_of(delivery: Delivery) -> str:
    """The fingerprint under which workers report this request."""
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
    """Collects the deaths that this leader's term has seen."""

    def __init__(self, context: TermContext, *, worker_reports: WorkerRegistry, crashes: DeathRegister) -> None:
        self._clock = context.clock
        self._worker_reports = worker_reports
        self._crashes = crashes

    async def collect(self, delivery: Delivery) -> tuple[WorkerDeath, ...]:
        """The deaths of workers that ran the request, earliest first; waits a little for the report of the last one."""
        key, request = Key(delivery.routing_key), fingerprint_of(delivery)
        until = self._clock.monotonic() + PATIENCE
        # A worker that still counts as running it has most likely just died: its death is the evidence to wait for.
        while self._is_reported_running(key, request) and (left := until - self._clock.monotonic()) > 0:
            await self._next_death(left)
        return self._crashes.of_request(key, request)

    def _is_reported_running(self, key: Key, request: str) -> bool:
        return any(request in worker.requests for worker in self._worker_reports.of_key(key))

    async def _next_death(self, seconds: float) -> None:
        death = asyncio.ensure_future(self._crashes.count.changed())
        timer = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait({death, timer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            death.cancel()
            timer.cancel()
