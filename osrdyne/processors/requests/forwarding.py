"""What the orphan processor decides about one request, as pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from osrdyne.amqp import Delivery, Message
from osrdyne.pool.state.admission import Verdict
from osrdyne.protocol.deadlines import DEADLINE_HEADER, is_past, remaining_expiration
from osrdyne.protocol.messages import HOPS_HEADER, Request, without_credentials
from osrdyne.protocol.names import Key
from osrdyne.protocol.statuses import Status

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
