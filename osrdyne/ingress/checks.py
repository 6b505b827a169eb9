"""The checks that a request of a managed pool passes before it is forwarded, in one order. Pure.

A request meets the checks of `REQUEST_CHECKS` when it is taken, then the splitter and the routes, then for each of its
deliveries the checks of `DELIVERY_CHECKS`. The first check that decides ends the order. Each check has a folder of its
own here; the wiring of a pool puts together those that it has. The ingress router applies them, `explain` shows them.

`decide` changes nothing, so that `explain` may call it. What a check counts when a request passes, it counts in
`passed`, and what follows from its own refusal in `refused`; only the router calls these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from osrdyne.errors import InvalidKeyError
from osrdyne.ingress.acceptance import RoutedRequest
from osrdyne.ingress.requests import Arrival
from osrdyne.protocol.deadlines import is_past
from osrdyne.protocol.messages import Request
from osrdyne.protocol.statuses import Status

REQUEST_CHECKS = ("key", "authorization", "size", "age", "quota")
"""The checks before the splitter, by their name and in their order."""
DELIVERY_CHECKS = ("grant", "listen", "removal", "circuit", "policy")
"""The checks of one delivery, after splitter and routes."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to a request that is not forwarded. `retry_after_ms`: when the client may try again, sent as the
    header `x-retry-after` in seconds. `discarded`: the request counts as accepted, and is dropped."""

    status: Status
    detail: str
    retry_after_ms: int | None = None
    discarded: bool = False

    @property
    def retry_after(self) -> float | None:
        """In seconds."""
        return None if self.retry_after_ms is None else self.retry_after_ms / 1000


@dataclass(frozen=True, slots=True)
class RequestCheck:
    """A check of a whole request; the second argument of `decide` is the time in milliseconds since the epoch.

    `describe`: a sentence for `explain` about a request that passes; None where the check does not concern it.
    """

    name: str
    decide: Callable[[Arrival, int], Refusal | None]
    passed: Callable[[Arrival], None] | None = None
    describe: Callable[[Arrival], str | None] = lambda arrival: None
    refused: Callable[[Arrival], None] | None = None


@dataclass(frozen=True, slots=True)
class DeliveryCheck:
    """A check of one delivery of a request. The key of the delivery is that of its group."""

    name: str
    decide: Callable[[Arrival, RoutedRequest, int], Refusal | None]
    passed: Callable[[Arrival, RoutedRequest], None] | None = None
    describe: Callable[[Arrival, RoutedRequest], str | None] = lambda arrival, routed: None
    refused: Callable[[Arrival, RoutedRequest], None] | None = None


C = TypeVar("C", RequestCheck, DeliveryCheck)


@dataclass(frozen=True, slots=True)
class Result:
    """What one check says, for `explain`: its refusal, or a sentence if it has one."""

    check: str
    refusal: Refusal | None
    text: str | None


class IngressChecks:
    """The checks of one pool. Their order is that of this module, whatever the order of the arguments."""

    def __init__(self, requests: Iterable[RequestCheck] = (), deliveries: Iterable[DeliveryCheck] = ()) -> None:
        self.requests = _in_order(requests, REQUEST_CHECKS)
        self.deliveries = _in_order(deliveries, DELIVERY_CHECKS)

    def refuse_request(self, arrival: Arrival, *, now_ms: int) -> Refusal | None:
        """Apply the checks before the splitter, and count the request in those that it passes."""
        return _apply(self.requests, arrival, at=(now_ms,))

    def refuse_delivery(self, arrival: Arrival, routed: RoutedRequest, *, now_ms: int) -> Refusal | None:
        """Apply the checks of one delivery, and count it in those that it passes."""
        return _apply(self.deliveries, arrival, routed, at=(now_ms,))

    def explain_request(self, arrival: Arrival, *, now_ms: int) -> list[Result]:
        """What the checks before the splitter say, up to the one that refuses. Counts nothing."""
        return _explain(self.requests, arrival, at=(now_ms,))

    def explain_delivery(self, arrival: Arrival, routed: RoutedRequest, *, now_ms: int) -> list[Result]:
        """What the checks of one delivery say, up to the one that refuses. Counts nothing."""
        return _explain(self.deliveries, arrival, routed, at=(now_ms,))


def _in_order(checks: Iterable[C], order: tuple[str, ...]) -> tuple[C, ...]:
    """Raises `ValueError` for a check without a place in the order."""
    return tuple(sorted(checks, key=lambda check: order.index(check.name)))


def _apply(checks: tuple[Any, ...], *subject: object, at: tuple[int]) -> Refusal | None:
    for check in checks:
        refusal: Refusal | None = check.decide(*subject, *at)
        if refusal is not None:
            if check.refused is not None:
                check.refused(*subject)
            return refusal
    # Only a request that passes all of these checks counts: one that is refused uses up nothing.
    for check in checks:
        if check.passed is not None:
            check.passed(*subject)
    return None


def _explain(checks: tuple[Any, ...], *subject: object, at: tuple[int]) -> list[Result]:
    results = []
    for check in checks:
        refusal = check.decide(*subject, *at)
        results.append(Result(check.name, refusal, check.describe(*subject) if refusal is None else None))
        if refusal is not None:
            break
    return results


def check_key(arrival: Arrival, now_ms: int) -> Refusal | None:
    """Refuse a key that is not valid."""
    try:
        arrival.check_key()
    except InvalidKeyError as error:
        return Refusal(Status.INVALID, str(error))
    return None


def check_age(request: Request, now_ms: int, *, skew_ms: int) -> Refusal | None:
    """Refuse a request whose caller has given up: no group may be started for it."""
    if is_past(request.deadline_ms, now_ms=now_ms, skew_ms=skew_ms):
        return Refusal(Status.EXPIRED, "The deadline of the request had passed before its group was ready.")
    return None


KEY_CHECK = RequestCheck("key", check_key)


def age_check(*, skew_ms: int) -> RequestCheck:
    """The check of the deadline, with the clock difference that the pool allows."""
    return RequestCheck("age", lambda arrival, now_ms: check_age(arrival.request, now_ms, skew_ms=skew_ms))
