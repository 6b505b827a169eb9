"""The decisions about one request in the orphan queue and the messages made of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC
from functools import lru_cache
from typing import Protocol

from osrdyne.amqp import Delivery, Message
from osrdyne.ingress.acceptance import Deadline, Limiter, RoutedRequest
from osrdyne.ingress.requests import Arrival
from osrdyne.pool.state.admission import Verdict
from osrdyne.protocol.deadlines import DEADLINE_HEADER, is_past, remaining_expiration
from osrdyne.protocol.messages import (
    DUPLICATE_HEADER,
    FAILED_DELIVERIES_HEADER,
    HOPS_HEADER,
    PATH_HEADER,
    ROUTE_HEADER,
    SPLIT_HEADER,
    Request,
    encode_path,
    without_credentials,
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

CAPACITY_RETRY_AFTER = 30.0
"""Seconds until a client should ask again where there is no room even to wait; about what a group needs to end."""
MAX_HOPS = 32
"""Forwards of one request; a group that is bound and unbound under it needs a few, more is a loop."""


class Doubt(Protocol):
    """Has RabbitMQ asked whether the queue of a key still exists and is bound; `since` (monotonic): when that became
    doubtful."""

    def __call__(self, key: Key, *, since: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is answered and not forwarded."""

    status: Status
    detail: str
    retry_after: float | None = None


def refuse_for(verdict: Verdict) -> Refusal | None:
    """A reason to answer a request for a new key at once, or None: it has a place, or waits for one in its queue."""
    match verdict:
        case Verdict.NO_ROOM:
            detail = "max_groups groups are up and max_waiting_groups wait for a place. Try again later."
        case Verdict.TOO_MANY_KEYS:
            detail = "max_distinct_keys different keys have been used; the operator of the pool can allow more."
        case Verdict.ADMITTED | Verdict.WAITING:
            return None
    return Refusal(Status.CAPACITY, detail, retry_after=CAPACITY_RETRY_AFTER)


def hops_of(request: Request) -> int:
    hops = request.headers.get(HOPS_HEADER)
    return hops if isinstance(hops, int) and hops >= 0 else 0


def refuse_orphan(request: Request, *, known: bool, now_ms: int, skew_ms: int) -> Refusal | None:
    """A reason to answer the request at once, or None. `known`: its group is up, or on its way up."""
    if is_past(request.deadline_ms, now_ms=now_ms, skew_ms=skew_ms):
        return Refusal(Status.EXPIRED, "The deadline of the request had passed before its group was ready.")
    if hops_of(request) >= MAX_HOPS:
        return Refusal(
            Status.REJECTED, f"The request was forwarded {MAX_HOPS} times without reaching a queue; please report this."
        )
    if request.no_activate and not known:
        return Refusal(
            Status.NOT_RUNNING, "No worker group is up for this key, and x-no-activate forbids to start one."
        )
    return None


def forwarded(delivery: Delivery, request: Request, *, now_ms: int, skew_ms: int) -> Message:
    """The message to publish to the request exchange: the deadline carried over, a hop counted, credentials removed.

    `expiration` is what is left of the deadline, with the allowed clock skew added: the worker checks the deadline
    itself, RabbitMQ must only not drop the request too early.
    """
    headers = without_credentials(delivery.headers)
    headers[HOPS_HEADER] = hops_of(request) + 1
    if request.deadline_ms is not None:
        headers[DEADLINE_HEADER] = request.deadline_ms
    return delivery.to_message(
        headers=headers, expiration=remaining_expiration(request.deadline_ms, now_ms=now_ms - skew_ms)
    )


def arrival_of(delivery: Delivery, *, now_ms: int) -> Arrival:
    """The request as routes see it, accepted now."""
    properties = delivery.properties
    published = properties.timestamp
    return Arrival(
        request=delivery.to_request(now_ms=now_ms),
        accepted_ms=now_ms,
        app_id=properties.app_id or None,
        message_id=properties.message_id or None,
        user_id=properties.user_id or None,
        message_type=properties.message_type or None,
        enqueued_time=None if published is None else published.astimezone(UTC).isoformat(),
    )


@lru_cache(maxsize=16)
def _work_exchanges(names: PoolNames) -> dict[str, int | None]:
    return {names.work_exchange(priority): priority for priority in (None, *PRIORITIES)}


def was_accepted(delivery: Delivery, names: PoolNames) -> bool:
    """Whether the ingress has seen this request before: it came back from a work exchange, or from a wait for its next
    attempt.

    The alternate exchange leaves the exchange that it was published to: nobody but who may write there can claim it.
    """
    return delivery.exchange in _work_exchanges(names) or delivery.exchange == names.retried_exchange


def routed_again(
    delivery: Delivery, request: Request, names: PoolNames, *, pool_ttl: float, now_ms: int
) -> RoutedRequest | None:
    """The routed of a request that was accepted before; else None."""
    if not was_accepted(delivery, names):
        return None
    at_ms = request.deadline_ms if request.deadline_ms is not None else now_ms + round(pool_ttl * 1000)
    return RoutedRequest(
        key=Key(request.key),
        path=request.path,
        priority=_work_exchanges(names).get(delivery.exchange, read_class(request.headers)),
        deadline=Deadline(at_ms, Limiter.CALLER),
        route=decode_text(request.headers.get(ROUTE_HEADER)),
        retry=read_terms(request.headers),
        attempts=read_attempts(request.headers),
        split_from=decode_text(request.headers.get(SPLIT_HEADER)),
        failed_deliveries=failed if isinstance(failed := request.headers.get(FAILED_DELIVERIES_HEADER), int) else 0,
    )


def passed_on(
    delivery: Delivery, request: Request, routed: RoutedRequest, *, perhaps_there: bool, now_ms: int, skew_ms: int
) -> Message:
    """The message of a routed: deadline, route, path and retries as decided, a hop counted, credentials removed.

    `expiration` is what is left of the deadline, with the allowed clock skew added: the worker checks the deadline
    itself, RabbitMQ must only not drop the request too early. What is `perhaps_there` already is marked.
    """
    headers = without_credentials(delivery.headers)
    for name in OWN_HEADERS:  # a caller has no say in them
        headers.pop(name, None)
    headers |= _retry_headers(routed)
    headers[HOPS_HEADER] = hops_of(request) + 1
    headers[DEADLINE_HEADER] = routed.deadline.at_ms
    own = {
        ROUTE_HEADER: routed.route,
        SPLIT_HEADER: routed.split_from,
        FAILED_DELIVERIES_HEADER: routed.failed_deliveries or None,
    }
    for name, value in own.items():
        headers.pop(name, None)
        if value is not None:
            headers[name] = value
    if perhaps_there:
        headers[DUPLICATE_HEADER] = True
    if routed.path != request.path:
        headers[PATH_HEADER] = encode_path(routed.path)
    expiration = remaining_expiration(routed.deadline.at_ms, now_ms=now_ms - skew_ms)
    message = delivery.to_message(headers=headers, expiration=expiration)
    return message if routed.keeps_reply else replace(message, reply_to=None)


def _retry_headers(routed: RoutedRequest) -> dict[str, object]:
    """What tells a worker whether and when to try the request again."""
    if routed.retry is None:
        return {}
    attempts = {ATTEMPTS_HEADER: routed.attempts} if routed.attempts else {}
    return {TERMS_HEADER: routed.retry.to_header(), CLASS_HEADER: class_name(routed.priority), **attempts}
