"""The decisions about one request in the orphan queue and the messages made of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC
from functools import lru_cache

from osrdyne.aio.clock import Backoff
from osrdyne.amqp import Delivery, Message
from osrdyne.auth.decision import AccessRefusal, bearer_token
from osrdyne.ingress.acceptance import Deadline, Limiter, RoutedRequest
from osrdyne.ingress.checks import Refusal, check_age
from osrdyne.ingress.requests import Arrival
from osrdyne.pool.state.groups.admission import Verdict
from osrdyne.protocol.deadlines import DEADLINE_HEADER, remaining_expiration
from osrdyne.protocol.messages import (
    AUTHORIZATION_HEADER,
    COALESCE_HEADER,
    DUPLICATE_HEADER,
    FAILED_DELIVERIES_HEADER,
    HOPS_HEADER,
    PATH_HEADER,
    PRINCIPAL_HEADER,
    PUT_BACKS_HEADER,
    REPLAY_HEADER,
    ROUTE_HEADER,
    SPLIT_HEADER,
    Request,
    encode_path,
    without_identity,
)
from osrdyne.protocol.names import PRIORITIES, Key, PoolNames
from osrdyne.protocol.retries import (
    ATTEMPTS_HEADER,
    CLASS_HEADER,
    OWN_HEADERS,
    TERMS_HEADER,
    class_name,
    read_attempts,
    read_class,
    read_terms,
)
from osrdyne.protocol.statuses import Status, decode_text

# Seconds after which a client should try again when no further group may wait; about the time a group needs to end.
CAPACITY_RETRY_AFTER = 30.0
# Between the attempts to publish a message that RabbitMQ has refused.
PUBLISH_RETRY = Backoff(initial=0.2, maximum=5.0)
# After a publish without a confirm; each further publish may become one more copy of the message.
UNCONFIRMED_RETRY = Backoff(initial=5.0, maximum=120.0)
# Outcome of a one-way copy that is refused or whose queue is unavailable: the request itself goes on.
COPY_DROPPED = "copy-dropped"
# Forwards of one request; a group that is unbound and bound again meanwhile needs a few, more are a loop.
MAX_HOPS = 32


@dataclass(frozen=True, slots=True)
class Orphan:
    """A request that was taken from the orphan queue at `at` (monotonic) and is not acknowledged. `refusal`: decided
    when it was taken; the caller is answered in the order of the requests of its key. `token`: a bearer token that has
    to be verified before anything else is decided."""

    delivery: Delivery
    arrival: Arrival
    at: float
    refusal: Refusal | None = None
    token: str | None = field(default=None, repr=False)

    @property
    def client_key(self) -> str:
        """The key that the client sent."""
        return self.request.key if self.arrival.split_from is None else self.arrival.split_from

    @property
    def request(self) -> Request:
        return self.arrival.request


@dataclass(frozen=True, slots=True)
class LoggedRefusal:
    """A request that its group refuses, and that the log stores anyway. `request`: the refused delivery; `write`: the
    delivery to the log."""

    refusal: Refusal
    request: RoutedRequest
    write: RoutedRequest


def refuse_for(verdict: Verdict) -> Refusal | None:
    """The refusal of a request for a new key; None if its group has a place, or waits for one while it is queued."""
    match verdict:
        case Verdict.NO_ROOM:
            # Answered at once, so that the caller can try again: the request has no queue in which it could wait.
            detail = "max_groups groups are up and max_waiting_groups wait for a place. Try again later."
        case Verdict.TOO_MANY_KEYS:
            detail = "max_distinct_keys different keys have been used; the operator of the pool can raise the limit."
        case Verdict.ADMITTED | Verdict.WAITING:
            return None
    return Refusal(Status.CAPACITY, detail, retry_after_ms=round(CAPACITY_RETRY_AFTER * 1000))


def seconds_left(routed: RoutedRequest, *, now_ms: int) -> float:
    """Seconds until the deadline of a delivery has passed; 0 if it has."""
    # One millisecond later than the deadline, so that it has passed for `is_past`, too.
    return max(0.0, (routed.deadline.at_ms + 1 - now_ms) / 1000)


def hops_of(request: Request) -> int:
    hops = request.headers.get(HOPS_HEADER)
    # Clients can write this header. A negative or foreign value counts as no hop.
    return hops if isinstance(hops, int) and hops >= 0 else 0


def refuse_orphan(request: Request, *, now_ms: int) -> Refusal | None:
    """The refusal of a request before it is routed, if any."""
    # Before everything else: no group may be started for a request whose caller has given up.
    if (refusal := check_age(request, now_ms)) is not None:
        return refusal
    # Ends a loop through the alternate exchange, for example when another program removes the binding each time.
    if hops_of(request) >= MAX_HOPS:
        return Refusal(
            Status.REJECTED, f"The request was forwarded {MAX_HOPS} times without reaching a queue; please report this."
        )
    return None


def refuse_activation(request: Request, *, known: bool) -> Refusal | None:
    """The refusal of a request that may start no group. `known`: the group is up, or being started."""
    if not request.no_activate or known:
        return None
    return Refusal(Status.NOT_RUNNING, "No worker group is up for this key, and x-no-activate forbids starting one.")


def direct_message(orphan: Orphan, *, now_ms: int) -> Message:
    """The message of a direct pool: the deadline carried on, a hop counted, credentials removed."""
    request = orphan.request
    # A worker runs code of the pool's users: it must not see the credentials by which a client was admitted.
    headers = without_identity(orphan.delivery.headers)
    headers[HOPS_HEADER] = hops_of(request) + 1
    # `expiration` starts anew at each publish; only this header keeps the moment at which the caller gives up.
    if request.deadline_ms is not None:
        headers[DEADLINE_HEADER] = request.deadline_ms
    return orphan.delivery.to_message(
        headers=headers, expiration=remaining_expiration(request.deadline_ms, now_ms=now_ms)
    )


def arrival_of(delivery: Delivery, *, now_ms: int, trusted: bool = False, skew_ms: int = 0) -> Arrival:
    """The request as the routes see it, accepted at `now_ms`. `trusted`: the ingress has set the name of its principal,
    because the request was accepted before. `skew_ms`: by how much the clock that set its deadline may be behind."""
    properties = delivery.properties
    published = properties.timestamp
    request = delivery.to_request(now_ms=now_ms, skew_ms=skew_ms)
    principal = request.principal if trusted else None
    # No condition, splitter or explanation sees the token.
    headers = without_identity(request.headers)
    return Arrival(
        request=request if len(headers) == len(request.headers) else replace(request, headers=headers),
        principal=principal,
        # The lifetime by a route starts here, at the acceptance, and not when the client published.
        accepted_ms=now_ms,
        app_id=properties.app_id or None,
        message_id=properties.message_id or None,
        user_id=properties.user_id or None,
        message_type=properties.message_type or None,
        enqueued_time=None if published is None else published.astimezone(UTC).isoformat(),
    )


def presented_token(delivery: Delivery) -> str | AccessRefusal:
    """The bearer token of a request, which may be text or a byte array."""
    presented = [value for name, value in delivery.headers.items() if name.lower() == AUTHORIZATION_HEADER]
    return bearer_token([decode_text(value) or "" for value in presented])


def is_replay(delivery: Delivery, user: str | None) -> bool:
    """Whether an operator has sent the request again from the poison inventory. `user`: the controller's own, which
    RabbitMQ lets no other connection name; None if it cannot be proven."""
    return user is not None and REPLAY_HEADER in delivery.headers and delivery.properties.user_id == user


@lru_cache(maxsize=16)
def _work_exchanges(names: PoolNames) -> dict[str, int | None]:
    # All levels, also unused ones: a request may return from a level that no route has used since.
    return {names.work_exchange(priority): priority for priority in (None, *PRIORITIES)}


def was_accepted(delivery: Delivery, names: PoolNames) -> bool:
    """Whether the ingress accepted this request before: it returned from a work exchange, or from a wait for its next
    attempt.

    The alternate exchange keeps the name of the exchange that a message was published to, so that only a client with
    write permission there can claim it.
    """
    return delivery.exchange in _work_exchanges(names) or delivery.exchange == names.retried_exchange


def routed_before(orphan: Orphan, names: PoolNames, *, pool_ttl: float) -> RoutedRequest | None:
    """The routing of a request that was accepted before; else None."""
    delivery, request = orphan.delivery, orphan.request
    if not was_accepted(delivery, names):
        # Only the exchange proves an earlier acceptance. The headers alone could be written by any client.
        return None
    at_ms = request.deadline_ms
    if at_ms is None:
        # Without a readable deadline header the pool's limit counts, from now on.
        at_ms = orphan.arrival.accepted_ms + round(pool_ttl * 1000)
    return RoutedRequest(
        key=Key(request.key),
        path=request.path,
        # From the exchange if it names the level. After a wait for another attempt only the header does.
        priority=_work_exchanges(names).get(delivery.exchange, read_class(request.headers)),
        deadline=Deadline(at_ms, Limiter.CALLER),
        route=decode_text(request.headers.get(ROUTE_HEADER)),
        retry=read_terms(request.headers),
        attempts=read_attempts(request.headers),
        split_from=decode_text(request.headers.get(SPLIT_HEADER)),
        coalesce=request.headers.get(COALESCE_HEADER) is True,
        failed_deliveries=request.failed_before,
        put_backs=request.put_backs,
    )


def managed_message(orphan: Orphan, routed: RoutedRequest, *, maybe_delivered: bool, now_ms: int) -> Message:
    """The message of a managed pool: deadline, route, path and retries as routed, a hop counted, credentials removed.

    A request that is `maybe_delivered` already is marked.
    """
    delivery, request = orphan.delivery, orphan.request
    headers = without_identity(delivery.headers)
    for name in OWN_HEADERS:  # clients must not set them
        headers.pop(name, None)
    # After the removal above: workers read only the retries of the routes, never those of a client.
    headers |= _retry_headers(routed)
    headers[HOPS_HEADER] = hops_of(request) + 1
    headers[DEADLINE_HEADER] = routed.deadline.at_ms
    own = {
        PRINCIPAL_HEADER: orphan.arrival.principal,
        ROUTE_HEADER: routed.route,
        SPLIT_HEADER: routed.split_from,
        FAILED_DELIVERIES_HEADER: routed.failed_deliveries or None,
        PUT_BACKS_HEADER: routed.put_backs or None,
        COALESCE_HEADER: routed.coalesce or None,
    }
    for name, value in own.items():
        headers.pop(name, None)
        if value is not None:
            headers[name] = value
    # From the first publish without a confirm on, a queue may have a copy already.
    if maybe_delivered:
        headers[DUPLICATE_HEADER] = True
    if routed.path != request.path:
        headers[PATH_HEADER] = encode_path(routed.path)
    expiration = remaining_expiration(routed.deadline.at_ms, now_ms=now_ms)
    message = delivery.to_message(headers=headers, expiration=expiration)
    # A one-way copy must not answer: the caller would get several last replies.
    return message if routed.keeps_reply else replace(message, reply_to=None)


def _retry_headers(routed: RoutedRequest) -> dict[str, object]:
    """The headers by which a worker decides whether and when to try the request again."""
    if routed.retry is None:
        return {}
    attempts = {ATTEMPTS_HEADER: routed.attempts} if routed.attempts else {}
    return {TERMS_HEADER: routed.retry.to_header(), CLASS_HEADER: class_name(routed.priority), **attempts}
