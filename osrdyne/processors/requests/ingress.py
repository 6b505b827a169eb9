"""The router of a managed pool, its ingress: every request passes it and is accepted or refused.

The checks of a request (`osrdyne.ingress.checks`) and the splitter are applied as soon as it is taken; the routes and
the checks of its deliveries, in the order of the requests of a key. A request that returns from a work exchange (its
group was unbound meanwhile) or from a wait for another attempt was accepted before: it keeps group, priority level and
deadline. Only its key, its age and the removal of its queue are checked again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from osrdyne.aio.clock import now_ms
from osrdyne.aio.tasks import SMALL, off_loop
from osrdyne.amqp import Delivery, Message
from osrdyne.auth.decision import AccessRefusal
from osrdyne.auth.grants import ALL_KEYS, Grant, Principal
from osrdyne.ingress.acceptance import RoutedRequest, accept
from osrdyne.ingress.checks import IngressChecks, Refusal, check_key, no_route
from osrdyne.ingress.conditions.samples import BodyNotParsedError
from osrdyne.ingress.policies.lifetimes import refuse_removed
from osrdyne.ingress.policies.limits import limit_age
from osrdyne.ingress.requests import Arrival
from osrdyne.ingress.splitter.rules import split_arrival
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import TokenVerifier
from osrdyne.pool.routing.active_manifest import ActiveSplitter
from osrdyne.pool.routing.circuits import ActiveCircuits
from osrdyne.pool.routing.deadlines import ForwardedDeadlines
from osrdyne.pool.routing.policies import ActivePolicies
from osrdyne.pool.routing.routes import ActiveRoutes
from osrdyne.pool.routing.telemetry import ActiveLog
from osrdyne.pool.state.groups.tracker import PoolStateTracker
from osrdyne.pool.state.queues.backlog import PriorityBacklog
from osrdyne.pool.state.queues.created_queues import CreatedQueues
from osrdyne.processors.forgeries import Forgeries
from osrdyne.processors.requests.cancellations import CANCELLED, KeptCancels
from osrdyne.processors.requests.forwarding import (
    COPY_DROPPED,
    LoggedRefusal,
    Orphan,
    arrival_of,
    is_replay,
    managed_message,
    presented_token,
    refuse_activation,
    refuse_orphan,
    routed_before,
    was_accepted,
)
from osrdyne.protocol.messages import Request
from osrdyne.protocol.statuses import Status

LOG_INTERVAL = 60.0  # Seconds between two warnings about the same fault of requests.
REPLAYED = Principal("replay", {Grant.SEND: ALL_KEYS})  # An operator may send a request again.


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressRules:
    """The active documents of a managed pool, and the checks of requests that they require."""

    routes: ActiveRoutes
    splitter: ActiveSplitter
    policies: ActivePolicies
    circuits: ActiveCircuits
    log: ActiveLog
    checks: IngressChecks


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """How the origin of a request is verified. `verifier`: of tokens, None without keys. `user`: the controller's own
    user in RabbitMQ, None if it is not known."""

    forgeries: Forgeries
    verifier: TokenVerifier | None
    user: str | None


class IngressRouter:
    """Routes the requests of a managed pool. `deadlines`: noted for the expiry sweeper, None without one."""

    in_sequence = False
    forwarded = "accepted"

    def __init__(
        self,
        context: TermContext,
        rules: IngressRules,
        provenance: Provenance,
        *,
        tracker: PoolStateTracker,
        created: CreatedQueues,
        backlog: PriorityBacklog,
        cancels: KeptCancels,
        deadlines: ForwardedDeadlines | None,
    ) -> None:
        self._names, self._clock, self._metrics = context.names, context.clock, context.metrics
        self._skew_ms = int(context.settings.requests.max_clock_skew * 1000)
        self._routes, self._splitter = rules.routes, rules.splitter
        self._policies, self._circuits, self._checks = rules.policies, rules.circuits, rules.checks
        self._forgeries, self._verifier, self._user = provenance.forgeries, provenance.verifier, provenance.user
        self._tracker = tracker
        self._created = created
        self._backlog = backlog
        self._cancels = cancels
        self._deadlines = deadlines
        self._active_log = rules.log
        self._warned = dict[str, float]()  # When each warning was logged last.
        self._log: Logger = get_logger("ingress", pool=self._names.pool)

    def receive(self, delivery: Delivery) -> Orphan | None:
        """The request with the key that the splitter makes; None for a forged one, which is counted and dropped.

        One whose token cannot be verified at once is returned with the token, for `identify`.
        """
        # Before the request is parsed further: a forged one must cost no splitter and no routes.
        if self._forgeries.is_forged_orphan(delivery):
            return None
        accepted, replay = was_accepted(delivery, self._names), is_replay(delivery, self._user)
        # The deadline of an accepted request comes from the clock of a leader.
        skew_ms = 0 if accepted else self._skew_ms
        arrival = arrival_of(delivery, now_ms=now_ms(self._clock), trusted=accepted or replay, skew_ms=skew_ms)
        if self._forgeries.refuses_reply_to(arrival.request, component="ingress"):
            self.count("reply-to-refused")
            return None
        at = self._clock.monotonic()
        if accepted:
            # It has passed the checks, and has the key that the splitter made: splitting it again would make another.
            return Orphan(delivery, arrival, at)
        if replay:
            # Its token was verified at its first delivery, and is not stored with the entry.
            return self._decide(delivery, replace(arrival, identity=REPLAYED), at)
        presented = presented_token(delivery)
        if presented is AccessRefusal.NO_TOKEN:
            return self._decide(delivery, arrival, at)
        if isinstance(presented, AccessRefusal):
            return self._decide(delivery, arrival.identified(presented), at)
        identity = AccessRefusal.NO_KEYS if self._verifier is None else self._verifier.identify_cached(presented)
        if identity is None:
            return Orphan(delivery, arrival, at, token=presented)
        return self._decide(delivery, arrival.identified(identity), at)

    async def identify(self, orphan: Orphan) -> Orphan:
        """Verify the token of a request, then apply the checks and the splitter as `receive` does."""
        assert self._verifier is not None
        assert orphan.token is not None
        identity = await self._verifier.identify(orphan.token)
        return self._decide(orphan.delivery, orphan.arrival.identified(identity), orphan.at)

    def _decide(self, delivery: Delivery, arrival: Arrival, at: float) -> Orphan:
        """Apply the checks of a request and the splitter."""
        refusal = self._checks.refuse_request(arrival, now_ms=now_ms(self._clock))
        if refusal is None and self._refuse(arrival) is None:
            arrival = self._split(arrival)
        return Orphan(delivery, arrival, at, refusal)

    def _split(self, arrival: Arrival) -> Arrival:
        splitter = self._splitter.splitter
        if splitter is None:
            return arrival
        split = splitter.split(arrival)
        if split.rule is not None:
            outcome = "split" if split.unchanged is None else "unchanged"
            self._metrics.splits.labels(rule=split.rule, outcome=outcome).inc()
        return split_arrival(arrival, split)

    async def route(self, orphan: Orphan) -> list[RoutedRequest] | Refusal | LoggedRefusal:
        """The deliveries by the routes; for a request that was accepted before, the one that it had."""
        body = orphan.request.body
        if len(body) <= SMALL:
            return self._route(orphan)
        sample = orphan.arrival.sample
        sample.defer_parsing()
        try:
            return self._route(orphan)
        except BodyNotParsedError:
            # Not on the event loop: a body of many megabytes would delay the heartbeats of the leader.
            await off_loop(len(body), sample.parse)
        # A cancel that arrived during the parse is kept for this request.
        return self._route(orphan, forget_cancel=False)

    def _route(self, orphan: Orphan, *, forget_cancel: bool = True) -> list[RoutedRequest] | Refusal | LoggedRefusal:
        """As `route`. Raises `BodyNotParsedError`, and has changed nothing but the kept cancels then."""
        arrival, request, limits = orphan.arrival, orphan.request, self._routes.ttl_limits
        refusal = orphan.refusal or self._refuse(arrival)
        # A request that expired between two leaders is routed first: the earlier one may have answered no-route, and
        # it gets the same answer again.
        if refusal is not None and not (orphan.delivery.redelivered and refusal.status is Status.EXPIRED):
            return refusal
        before = routed_before(orphan, self._names, pool_ttl=limits.default)
        if before is not None:
            # Only here and not for new requests: a client may use the name of a cancelled request again.
            if self._cancels.was_cancelled(request):
                return CANCELLED
            refusal = refusal or refuse_removed(self._created.get(before.key))
            return refusal or self._refuse_activation(request, before) or [before]
        if forget_cancel:
            # A new request of this name: the cancel that is still kept was meant for the one before it.
            self._cancels.forget(request)
        routed = accept(arrival, self._routes.table, limits=limits)
        if self._policies.has_any:
            routed = [limit_age(arrival, one, self._policies.of) for one in routed]
        if self._routes.table is not None and arrival.sample.exceeded:
            self._note_work_limit(arrival)
        # Before `refusal`: a request that expired between two leaders may have been answered `no-route` by the earlier.
        if not routed:
            return self._no_route(arrival)
        return refusal or self._check(arrival, routed)

    def _check(self, arrival: Arrival, routed: list[RoutedRequest]) -> list[RoutedRequest] | Refusal | LoggedRefusal:
        """The deliveries that their checks allow; the refusal if the request itself is refused."""
        request = arrival.request
        if not self._checks.deliveries and not request.no_activate and all(one.log is None for one in routed):
            return routed
        now, allowed = now_ms(self._clock), list[RoutedRequest]()
        for one in routed:
            # The checks of a delivery are about its group, and the log has none.
            if one.log is not None:
                refusal = self._active_log.log.refuse(one)
            else:
                refusal = self._refuse_activation(request, one)
                refusal = refusal or self._checks.refuse_delivery(arrival, one, now_ms=now)
            if refusal is None:
                allowed.append(one)
            elif one.keeps_reply:
                # The log stores the request although its group refuses it.
                writes = [other for other in routed if other.log is not None and other is not one]
                if writes and self._active_log.log.refuse(writes[0]) is None:
                    return LoggedRefusal(refusal, one, writes[0])
                return refusal
            else:
                self.count(COPY_DROPPED, one)
        return allowed

    def _refuse_activation(self, request: Request, routed: RoutedRequest) -> Refusal | None:
        return refuse_activation(request, known=self._tracker.status(routed.key) is not None)

    def _refuse(self, arrival: Arrival) -> Refusal | None:
        """Why the request is refused regardless of the routes."""
        now = now_ms(self._clock)
        # Both were checked before: the splitter may have made another key since, and the request may have waited.
        return check_key(arrival, now) or refuse_orphan(arrival.request, now_ms=now)

    def _note_work_limit(self, arrival: Arrival) -> None:
        """Count the conditions that reached the work limit for this request; warn once a minute at most."""
        self._metrics.conditions_limited.inc(arrival.sample.exceeded)
        self._warn("conditions reach their work limit and are undefined", arrival, conditions=arrival.sample.exceeded)

    def _no_route(self, arrival: Arrival) -> Refusal:
        """A device that sends events reads no answer: the log says why its $body was not read, too."""
        why = arrival.sample.unread_body
        if why is not None:
            self._warn("no route takes a request whose $body was not read", arrival, cause=why)
        return no_route(arrival)

    def _warn(self, event: str, arrival: Arrival, **fields: object) -> None:
        """Log a fault of a request, each event once a minute at most."""
        now = self._clock.monotonic()
        if now - self._warned.get(event, -LOG_INTERVAL) >= LOG_INTERVAL:
            self._warned[event] = now
            request = arrival.request
            self._log.warning(event, key=request.key, body_bytes=len(request.body), **fields)

    async def prepare(self, routed: RoutedRequest) -> None:
        """Make sure that the exchange of its priority level exists, and wait until a pause of its group is sent to the
        workers. Raises `BrokerConflictError`."""
        await self._routes.require_level(routed.priority)
        # Before the publish: a worker that is not paused yet would take the request.
        await self._circuits.settled(routed.key)

    def exchange_for(self, routed: RoutedRequest) -> str:
        return self._names.work_exchange(routed.priority)

    def message(self, orphan: Orphan, routed: RoutedRequest, *, maybe_delivered: bool) -> Message:
        """The message to publish now; a header marks one that is `maybe_delivered` already."""
        now = now_ms(self._clock)
        return managed_message(orphan, routed, maybe_delivered=maybe_delivered, now_ms=now)

    def note_published(self, routed: RoutedRequest, *, began_at: float) -> None:
        """Note a confirmed delivery for the age of the backlog and for the expiry sweeper."""
        # The moment when the publish began: the request may be in the queue from then on.
        self._backlog.note(routed.key, routed.priority, began_at)
        self._circuits.note_published(routed.route, routed.key)
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
