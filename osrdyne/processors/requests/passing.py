"""From a delivery to what the ingress decides about, and from a decision to the message that goes on. Pure."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC
from functools import lru_cache

from osrdyne.amqp import Delivery, Message
from osrdyne.ingress.acceptance import Deadline, Limiter, Passage
from osrdyne.ingress.requests import Arrival
from osrdyne.processors.requests.forwarding import hops_of
from osrdyne.protocol.deadlines import DEADLINE_HEADER, remaining_expiration
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
from osrdyne.protocol.statuses import decode_text


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


def passage_again(
    delivery: Delivery, request: Request, names: PoolNames, *, pool_ttl: float, now_ms: int
) -> Passage | None:
    """The passage of a request that was accepted before; else None."""
    if not was_accepted(delivery, names):
        return None
    at_ms = request.deadline_ms if request.deadline_ms is not None else now_ms + round(pool_ttl * 1000)
    return Passage(
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
    delivery: Delivery, request: Request, passage: Passage, *, perhaps_there: bool, now_ms: int, skew_ms: int
) -> Message:
    """The message of a passage: deadline, route, path and retries as decided, a hop counted, credentials removed.

    `expiration` is what is left of the deadline, with the allowed clock skew added: the worker checks the deadline
    itself, RabbitMQ must only not drop the request too early. What is `perhaps_there` already is marked.
    """
    headers = without_credentials(delivery.headers)
    for name in OWN_HEADERS:  # a caller has no say in them
        headers.pop(name, None)
    headers |= _retry_headers(passage)
    headers[HOPS_HEADER] = hops_of(request) + 1
    headers[DEADLINE_HEADER] = passage.deadline.at_ms
    own = {
        ROUTE_HEADER: passage.route,
        SPLIT_HEADER: passage.split_from,
        FAILED_DELIVERIES_HEADER: passage.failed_deliveries or None,
    }
    for name, value in own.items():
        headers.pop(name, None)
        if value is not None:
            headers[name] = value
    if perhaps_there:
        headers[DUPLICATE_HEADER] = True
    if passage.path != request.path:
        headers[PATH_HEADER] = encode_path(passage.path)
    expiration = remaining_expiration(passage.deadline.at_ms, now_ms=now_ms - skew_ms)
    message = delivery.to_message(headers=headers, expiration=expiration)
    return message if passage.keeps_reply else replace(message, reply_to=None)


def _retry_headers(passage: Passage) -> dict[str, object]:
    """What tells a worker whether and when to try the request again."""
    if passage.retry is None:
        return {}
    attempts = {ATTEMPTS_HEADER: passage.attempts} if passage.attempts else {}
    return {TERMS_HEADER: passage.retry.to_header(), CLASS_HEADER: class_name(passage.priority), **attempts}
