"""The router of a direct pool: each orphan goes to the group of its key.

A request is an orphan while its key has no binding. Clients publish to the request exchange, and RabbitMQ passes what
it cannot route to the orphan queue through the alternate exchange.
"""

from __future__ import annotations

from osrdyne.aio.clock import now_ms
from osrdyne.amqp import Delivery, Message
from osrdyne.errors import InvalidKeyError
from osrdyne.ingress.acceptance import Deadline, Limiter, RoutedRequest
from osrdyne.ingress.checks import Refusal
from osrdyne.ingress.requests import Arrival
from osrdyne.pool.context import TermContext
from osrdyne.pool.state.groups.tracker import PoolStateTracker
from osrdyne.processors.forgeries import Forgeries
from osrdyne.processors.requests.forwarding import Orphan, direct_message, refuse_activation, refuse_orphan
from osrdyne.protocol.messages import HOPS_HEADER
from osrdyne.protocol.names import parse_key
from osrdyne.protocol.statuses import Status


class DirectRouter:
    """Routes the orphans of a direct pool."""

    in_sequence = True
    forwarded = "forwarded"

    def __init__(self, context: TermContext, *, tracker: PoolStateTracker, forgeries: Forgeries) -> None:
        requests = context.settings.requests
        self._names, self._clock, self._metrics = context.names, context.clock, context.metrics
        self._ttl_ms = int(requests.ttl * 1000)
        self._skew_ms = int(requests.max_clock_skew * 1000)
        self._tracker = tracker
        self._forgeries = forgeries

    def receive(self, delivery: Delivery) -> Orphan | None:
        """The request; None for a forged one, which is counted and dropped."""
        if self._forgeries.is_forged_orphan(delivery):
            return None
        now = now_ms(self._clock)
        # The deadline of a request that was forwarded before comes from the clock of a leader.
        skew_ms = 0 if HOPS_HEADER in delivery.headers else self._skew_ms
        arrival = Arrival(delivery.to_request(now_ms=now, skew_ms=skew_ms), accepted_ms=now)
        if self._forgeries.refuses_reply_to(arrival.request, component="orphans"):
            self.count("reply-to-refused")
            return None
        return Orphan(delivery, arrival, self._clock.monotonic())

    async def identify(self, orphan: Orphan) -> Orphan:
        """A direct pool verifies no tokens: a request for a bound key does not pass the controller."""
        return orphan

    async def route(self, orphan: Orphan) -> list[RoutedRequest] | Refusal:
        """One delivery, to the group of its key."""
        request, now = orphan.request, now_ms(self._clock)
        try:
            key = parse_key(request.key)
        except InvalidKeyError as error:
            return Refusal(Status.INVALID, str(error))
        # No await between this and the decision: the group may end during it.
        known = self._tracker.status(key) is not None
        refusal = refuse_orphan(request, now_ms=now)
        refusal = refusal or refuse_activation(request, known=known)
        if refusal is not None:
            return refusal
        # Held until its deadline, or else for as long as it may wait in a request queue.
        if request.deadline_ms is None:
            deadline = Deadline(now + self._ttl_ms, Limiter.POOL)
        else:
            deadline = Deadline(request.deadline_ms, Limiter.CALLER)
        return [RoutedRequest(key, request.path, None, deadline, None)]

    async def prepare(self, routed: RoutedRequest) -> None:
        """A direct pool has no priority levels and no circuits."""

    def exchange_for(self, routed: RoutedRequest) -> str:
        return self._names.requests_exchange

    def message(self, orphan: Orphan, routed: RoutedRequest, *, maybe_delivered: bool) -> Message:
        """The message to publish now; a direct pool marks no duplicates."""
        return direct_message(orphan, now_ms=now_ms(self._clock))

    def note_published(self, routed: RoutedRequest, *, began_at: float) -> None:
        """Do nothing: a direct pool has no figures of its queues, because clients also publish straight to them."""

    def count(self, outcome: str, routed: RoutedRequest | None = None, *, again: bool = False) -> None:
        self._metrics.orphans.labels(outcome=outcome).inc()
