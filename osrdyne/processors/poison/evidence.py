"""The evidence on a request's failed deliveries: deaths of workers that ran it, and returns that are no evidence.

At RabbitMQ's delivery limit the second kind decides whether the request gets further deliveries, and the first kind
explains a poison request to an operator. Read by the dead letter responder.
"""

from __future__ import annotations

import asyncio

from osrdyne.amqp import Delivery
from osrdyne.pool.context import TermContext
from osrdyne.pool.state.workers.crashes import DeathRegister, FailedDeliveries
from osrdyne.pool.state.workers.worker_reports import WorkerRegistry
from osrdyne.protocol.names import Key
from osrdyne.protocol.poison import WorkerDeath

# Seconds to wait for the driver to report the last worker's death, which RabbitMQ has already noticed.
PATIENCE = 3.0


class EvidenceCollector:
    """Collects the deaths that this leader's term has seen."""

    def __init__(self, context: TermContext, *, worker_reports: WorkerRegistry, crashes: DeathRegister) -> None:
        self._clock = context.clock
        self._worker_reports = worker_reports
        self._crashes = crashes

    async def settle(self, delivery: Delivery, *, also_waiting: bool = False) -> None:
        """Wait a little until no worker reports that it runs the request; `also_waiting`: or that it waits there."""
        key, request = Key(delivery.routing_key), delivery.fingerprint()
        until = self._clock.monotonic() + PATIENCE
        # A worker that still reports it has most likely just died, or returned it: that is the evidence to wait for.
        while self._is_reported(key, request, also_waiting=also_waiting):
            if (left := until - self._clock.monotonic()) <= 0:
                return
            await self._next_change(left)

    def deaths(self, delivery: Delivery) -> tuple[WorkerDeath, ...]:
        """The deaths of workers that ran the request, earliest first."""
        return self._crashes.of_request(Key(delivery.routing_key), delivery.fingerprint())

    def take_failed(self, delivery: Delivery) -> FailedDeliveries:
        """What is known about its failed deliveries since the last call."""
        key, request = Key(delivery.routing_key), delivery.fingerprint()
        workers = self._worker_reports.of_key(key)
        # It is in no worker any more, and the end of this one is not noticed yet.
        waited = any(request in worker.waiting and request not in worker.requests for worker in workers)
        known = self._crashes.take_failed(key, request)
        return known._replace(innocent=known.innocent + waited)

    def _is_reported(self, key: Key, request: str, *, also_waiting: bool) -> bool:
        workers = self._worker_reports.of_key(key)
        return any(request in worker.requests or (also_waiting and request in worker.waiting) for worker in workers)

    async def _next_change(self, seconds: float) -> None:
        change = asyncio.ensure_future(self._crashes.count.changed())
        timer = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait({change, timer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()
            timer.cancel()
