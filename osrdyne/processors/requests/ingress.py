"""The router of a managed pool, its ingress: every request passes it and is accepted or refused.

The splitter is asked as soon as a request is taken; the routes, in the order of the requests of a key. A request that
returns from a work exchange (its group was unbound meanwhile) or from a wait for another attempt was accepted before:
it keeps group, priority level and deadline.
"""

from __future__ import annotations

from osrdyne.aio.clock import now_ms
from osrdyne.amqp import Delivery, Message
from osrdyne.errors import InvalidKeyError
from osrdyne.ingress.acceptance import RoutedRequest, accept
from osrdyne.ingress.requests import Arrival
from osrdyne.ingress.splitter.rules import split_arrival
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.routing.active_manifest import ActiveSplitter
from osrdyne.pool.routing.deadlines import PassedDeadlines
from osrdyne.pool.routing.routes import ActiveRoutes
from osrdyne.pool.state.backlog import PriorityBacklog
from osrdyne.pool.state.tracker import PoolStateTracker
from osrdyne.processors.forgeries import Forgeries
from osrdyne.processors.requests.cancellations import KeptCancels
from osrdyne.processors.requests.forwarding import (
    Orphan,
    Refusal,
    arrival_of,
    managed_message,
    refuse_orphan,
    routed_before,
    was_accepted,
)
from osrdyne.protocol.names import Key
from osrdyne.protocol.statuses import Status

CANCELLED = Refusal(Status.CANCELLED, "The client cancelled the request.")
WORK_LIMIT_LOG_INTERVAL = 60.0  # Seconds between two warnings about conditions that reach their work limit.
NO_ROUTE = Refusal(Status.NO_ROUTE, "No route of this pool matches the request; `osrdyne explain` shows why.")


class IngressRouter:
    """Routes the requests of a managed pool. `deadlines`: noted for the expiry sweeper, None without one."""

    in_sequence = False
    forwarded = "accepted"

    def __init__(
        self,
        context: TermContext,
        *,
        tracker: PoolStateTracker,
        routing: ActiveRoutes,
        splitting: ActiveSplitter,
        cancels: KeptCancels,
        forgeries: Forgeries,
        backlog: PriorityBacklog,
        deadlines: PassedDeadlines | None,
    ) -> None:
        self._names, self._clock, self._metrics = context.names, context.clock, context.metrics
        self._skew_ms = int(context.settings.requests.max_clock_skew * 1000)
        self._tracker = tracker
        self._routing = routing
        self._splitting = splitting
        self._cancels = cancels
        self._forgeries = forgeries
        self._backlog = backlog
        self._deadlines = deadlines
        self._work_limit_logged = -WORK_LIMIT_LOG_INTERVAL
        self._log: Logger = get_logger("ingress", pool=self._names.pool)

    def receive(self, delivery: Delivery) -> Arrival | None:
        """The request with the key that the splitter makes; None for a forged one, which is counted and dropped."""
        # Before the request is parsed further: a forged one must cost no splitter and no routes.
        if self._forgeries.is_forged_orphan(delivery):
            return None
        arrival = self._split(arrival_of(delivery, now_ms=now_ms(self._clock)), delivery)
        if self._forgeries.refuses_reply_to(arrival.request, component="ingress"):
            self.count("reply-to-refused")
            return None
        return arrival

    def _split(self, arrival: Arrival, delivery: Delivery) -> Arrival:
        """A request that is refused anyway is not split."""
        splitter = self._splitting.splitter
        # One that was accepted before already has the key that the splitter made; splitting it again would make a third
        # one.
        if splitter is None or was_accepted(delivery, self._names) or self._refuse(arrival, known=True) is not None:
            return arrival
        split = splitter.split(arrival)
        if split.rule is not None:
            outcome = "split" if split.unchanged is None else "unchanged"
            self._metrics.splits.labels(rule=split.rule, outcome=outcome).inc()
        return split_arrival(arrival, split)

    def route(self, orphan: Orphan) -> list[RoutedRequest] | Refusal:
        """As the routes say; as before if the request was accepted before."""
        arrival, request, limits = orphan.arrival, orphan.request, self._routing.ttl_limits
        refusal = self._refuse(arrival, known=self._tracker.status(Key(request.key)) is not None)
        # A request that expired between two leaders is routed first: the earlier one may have answered no-route, and
        # it gets the same answer again.
        if refusal is not None and not (orphan.delivery.redelivered and refusal.status is Status.EXPIRED):
            return refusal
        before = routed_before(orphan, self._names, pool_ttl=limits.default)
        if before is not None:
            # Only here and not for new requests: a client may use the name of a cancelled request again.
            return CANCELLED if self._cancels.was_cancelled(request) else refusal or [before]
        # A new request of this name: the cancel that is still kept was meant for the one before it.
        self._cancels.forget(request)
        routed = accept(arrival, self._routing.table, limits=limits)
        if self._routing.table is not None and arrival.sample.exceeded:
            self._note_work_limit(arrival)
        # `no-route` goes first: of a request that expired between two leaders, the earlier one may have answered that.
        return refusal or routed if routed else NO_ROUTE

    def _refuse(self, arrival: Arrival, *, known: bool) -> Refusal | None:
        """Why the request is refused regardless of the routes. `known`: its group is up, or being started."""
        try:
            arrival.check_key()
        except InvalidKeyError as error:
            return Refusal(Status.INVALID, str(error))
        return refuse_orphan(arrival.request, known=known, now_ms=now_ms(self._clock), skew_ms=self._skew_ms)

    def _note_work_limit(self, arrival: Arrival) -> None:
        """Count the conditions that reached the work limit for this request; warn once a minute at most."""
        self._metrics.conditions_limited.inc(arrival.sample.exceeded)
        if self._clock.monotonic() - self._work_limit_logged >= WORK_LIMIT_LOG_INTERVAL:
            self._work_limit_logged = self._clock.monotonic()
            self._log.warning(
                "conditions reach their work limit and are undefined",
                key=arrival.request.key,
                conditions=arrival.sample.exceeded,
                body_bytes=len(arrival.request.body),
            )

    async def require_priority(self, priority: int | None) -> None:
        """Have the exchange and the queues of a priority level. Raises `BrokerConflictError`."""
        await self._routing.require_level(priority)

    def exchange_for(self, routed: RoutedRequest) -> str:
        return self._names.work_exchange(routed.priority)

    def message(self, orphan: Orphan, routed: RoutedRequest, *, maybe_delivered: bool) -> Message:
        """The message to publish now; a header marks one that is `maybe_delivered` already."""
        now = now_ms(self._clock)
        return managed_message(orphan, routed, maybe_delivered=maybe_delivered, now_ms=now, skew_ms=self._skew_ms)

    def note_published(self, routed: RoutedRequest, *, began_at: float) -> None:
        """Note a confirmed delivery for the age of the backlog and for the expiry sweeper."""
        # The moment when the publish began: the request may be in the queue from then on.
        self._backlog.note(routed.key, routed.priority, began_at)
        if self._deadlines is not None:
            self._deadlines.note((routed.key, routed.priority), routed.deadline.at_ms)

    def count(self, outcome: str, routed: RoutedRequest | None = None, *, again: bool = False) -> None:
        """Count an outcome, by route and priority level if the request was routed."""
        labels = {"route": "", "priority": ""}
        if routed is not None:
            labels = self._metrics.of_route(routed.route, routed.priority)
        self._metrics.ingress.labels(outcome=outcome, **labels).inc()
        if again:
            self._metrics.refused_again.inc()
