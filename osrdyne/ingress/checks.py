"""The checks that a request of a managed pool passes before it is forwarded, in one order. Pure.

When the ingress takes a request, it applies the checks of `REQUEST_CHECKS`, then the splitter and the routes, then the
checks of `DELIVERY_CHECKS` to each delivery. The first refusal ends the order. The wiring of a pool chooses its checks;
`explain` shows their results.

`decide` changes nothing, so that `explain` may call it. `passed` counts a request that all checks let pass, `refused`
acts on the check's own refusal; only the ingress calls these.
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
    """The result of one check for `explain`: its refusal, or a sentence about a request that passes."""

    check: str
    refusal: Refusal | None
    text: str | None


class IngressChecks:
    """The checks of one pool, in the order of this module."""

    def __init__(self, requests: Iterable[RequestCheck] = (), deliveries: Iterable[DeliveryCheck] = ()) -> None:
        self.requests = _in_order(requests, REQUEST_CHECKS)
        self.deliveries = _in_order(deliveries, DELIVERY_CHECKS)

    def refuse_request(self, arrival: Arrival, *, now_ms: int) -> Refusal | None:
        """Apply the checks before the splitter. Each of them counts a request that passes all."""
        return _apply(self.requests, arrival, at=(now_ms,))

    def refuse_delivery(self, arrival: Arrival, routed: RoutedRequest, *, now_ms: int) -> Refusal | None:
        """Apply the checks of one delivery. Each of them counts a delivery that passes all."""
        return _apply(self.deliveries, arrival, routed, at=(now_ms,))

    def explain_request(self, arrival: Arrival, *, now_ms: int) -> list[Result]:
        """The results of the checks before the splitter, up to the first refusal. Counts nothing."""
        return _explain(self.requests, arrival, at=(now_ms,))

    def explain_delivery(self, arrival: Arrival, routed: RoutedRequest, *, now_ms: int) -> list[Result]:
        """The results of the checks of one delivery, up to the first refusal. Counts nothing."""
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
    # Only after all of them: a request that a later check refuses must use up no quota.
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


def no_route(arrival: Arrival) -> Refusal:
    """The answer to a request that no route takes. It says why a condition could not read the body."""
    why = arrival.sample.unread_body
    cause = "" if why is None else f" $body was not read: {why}."
    return Refusal(Status.NO_ROUTE, f"No route of this pool matches the request; `osrdyne explain` shows why.{cause}")


def check_key(arrival: Arrival, now_ms: int) -> Refusal | None:
    """Refuse a key that is not valid."""
    try:
        arrival.check_key()
    except InvalidKeyError as error:
        return Refusal(Status.INVALID, str(error))
    return None


def check_age(request: Request, now_ms: int) -> Refusal | None:
    """Refuse a request whose deadline has passed: no group may be started for it."""
    if is_past(request.deadline_ms, now_ms=now_ms):
        return Refusal(Status.EXPIRED, "The deadline of the request had passed before its group was ready.")
    return None


KEY_CHECK = RequestCheck("key", check_key)
AGE_CHECK = RequestCheck("age", lambda arrival, now_ms: check_age(arrival.request, now_ms))
