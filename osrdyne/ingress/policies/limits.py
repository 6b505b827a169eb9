"""MaxMessageSize and MaxMessageAge: limits of one request. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from osrdyne.ingress.acceptance import Deadline, Limiter, RoutedRequest
from osrdyne.ingress.checks import DeliveryCheck, Refusal, RequestCheck
from osrdyne.ingress.policies.lengths import describe_length, limits_length
from osrdyne.ingress.policies.table import FoundPolicy
from osrdyne.ingress.requests import Arrival
from osrdyne.protocol.statuses import Status

# The policy of a key; None if none acts on it.
PolicyOf = Callable[[str], FoundPolicy | None]


def request_checks(policy_of: PolicyOf) -> list[RequestCheck]:
    """The checks of a whole request."""
    return [size_check(policy_of), no_age_check(policy_of)]


def delivery_checks(policy_of: PolicyOf) -> list[DeliveryCheck]:
    """The checks of one delivery."""
    return [delivery_age_check(policy_of)]


def header_bytes(value: object) -> int:
    """The size of a header value: the bytes of a text, 8 for a number, names and values of a table or list."""
    match value:
        case str():
            return len(value.encode("utf-8", "surrogatepass"))
        case bytes() | bytearray():
            return len(value)
        case Mapping():
            return sum(header_bytes(name) + header_bytes(item) for name, item in value.items())
        case list() | tuple():
            return sum(map(header_bytes, value))
        case None | bool():
            return 1
        case _:
            return 8


def message_bytes(arrival: Arrival) -> int:
    """The size of a request: its body and the names and values of its headers."""
    return len(arrival.request.body) + header_bytes(arrival.request.headers)


def size_check(policy_of: PolicyOf) -> RequestCheck:
    """The check of MaxMessageSize, by the key that the client sent."""

    def decide(arrival: Arrival, now_ms: int) -> Refusal | None:
        found = policy_of(arrival.request.key)
        if found is None or (size := message_bytes(arrival)) <= found.policy.max_message_size:
            return None
        limit = found.policy.max_message_size
        detail = f"The request has {size} bytes with its headers; the {found.name} allows {limit} (MaxMessageSize)."
        return Refusal(Status.TOO_LARGE, detail)

    def describe(arrival: Arrival) -> str | None:
        found = policy_of(arrival.request.key)
        if found is None:
            return None
        limit = found.policy.max_message_size
        return f"{message_bytes(arrival)} of {limit} bytes, by MaxMessageSize of the {found.name}."

    return RequestCheck("size", decide, describe=describe)


def no_age_check(policy_of: PolicyOf) -> RequestCheck:
    """The check of a MaxMessageAge of 0, by the key that the client sent."""
    return RequestCheck("age", lambda arrival, now_ms: _refuse_all(policy_of(arrival.request.key)))


def delivery_age_check(policy_of: PolicyOf) -> DeliveryCheck:
    """The same check by the key of the group, which the splitter or a route may have changed."""

    def describe(arrival: Arrival, routed: RoutedRequest) -> str | None:
        found = policy_of(routed.key)
        if found is None:
            return None
        length = f" {describe_length(found)}" if limits_length(found) else ""
        return f"The {found.name} acts on the group {routed.key!r}.{length}"

    return DeliveryCheck(
        "policy", lambda arrival, routed, now_ms: _refuse_all(policy_of(routed.key)), describe=describe
    )


def _refuse_all(found: FoundPolicy | None) -> Refusal | None:
    if found is None or found.policy.max_message_age > 0:
        return None
    return Refusal(Status.EXPIRED, f"The {found.name} has a MaxMessageAge of 0: it drops every request.")


def limit_age(arrival: Arrival, routed: RoutedRequest, policy_of: PolicyOf) -> RoutedRequest:
    """The delivery with no later deadline than MaxMessageAge allows, counted from its acceptance. A policy is about the
    queue of a key, so a write to the log has none."""
    found = None if routed.log is not None else policy_of(routed.key)
    if found is None:
        return routed
    latest = arrival.accepted_ms + round(found.policy.max_message_age * 1000)
    if latest >= routed.deadline.at_ms:
        return routed
    return replace(routed, deadline=Deadline(latest, Limiter.POLICY))
