"""Authorization: requests that need a token with the grant `send`, and workers that need the grant `listen`.
Discoverability: who sees a queue. Pure.

The token is verified before these checks, which read the result from the arrival. The checks apply to the key that the
client sent and to the key that the splitter made of it, but not to a group that a route names: the operator chose it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from enum import StrEnum

from osrdyne.auth.decision import KEYS_RETRY_AFTER, AccessRefusal, check_grant
from osrdyne.auth.grants import Grant
from osrdyne.ingress.acceptance import RoutedRequest
from osrdyne.ingress.checks import DeliveryCheck, Refusal, RequestCheck
from osrdyne.ingress.documents.problems import Problem
from osrdyne.ingress.policies.limits import PolicyOf
from osrdyne.ingress.policies.manifest import KeyPolicy, PolicyManifest
from osrdyne.ingress.policies.policy import Authorization, Bounds, Discoverability
from osrdyne.ingress.policies.table import FoundPolicy
from osrdyne.ingress.requests import Arrival
from osrdyne.protocol.statuses import Status

ELEMENT = "Authorization"


def authorization_check(policy_of: PolicyOf) -> RequestCheck:
    """The check by the key that the client sent."""
    return RequestCheck(
        "authorization",
        lambda arrival, now_ms: _refuse(arrival, arrival.request.key, policy_of(arrival.request.key)),
        describe=lambda arrival: _describe(arrival, policy_of(arrival.request.key)),
    )


def delivery_authorization_check(policy_of: PolicyOf) -> DeliveryCheck:
    """The same check by the key that the splitter made, because the client's request decides about that key."""

    def is_split(arrival: Arrival, routed: RoutedRequest) -> bool:
        return arrival.split_from is not None and routed.key == arrival.request.key

    return DeliveryCheck(
        "grant",
        lambda arrival, routed, now_ms: (
            _refuse(arrival, routed.key, policy_of(routed.key)) if is_split(arrival, routed) else None
        ),
        describe=lambda arrival, routed: (
            _describe(arrival, policy_of(routed.key)) if is_split(arrival, routed) else None
        ),
    )


def receive_check(policy_of: PolicyOf, workers: Callable[[str], str | None]) -> DeliveryCheck:
    """The check whether the workers of the group may receive requests. `workers`: why the workers of a key may not;
    None if they may."""

    def decide(routed: RoutedRequest) -> Refusal | None:
        found = policy_of(routed.key)
        if found is None or not found.policy.authorization.demands_receive or (why := workers(routed.key)) is None:
            return None
        return Refusal(Status.FORBIDDEN, f"The {found.name} demands the grant listen of the workers; {why}.")

    return DeliveryCheck("listen", lambda arrival, routed, now_ms: decide(routed))


def _refuse(arrival: Arrival, key: str, found: FoundPolicy | None) -> Refusal | None:
    if found is None or not found.policy.authorization.demands_send:
        return None
    identity = arrival.identity
    if isinstance(identity, AccessRefusal):
        detail = f"The {found.name} demands a token with the grant send for the key {key!r}; {identity.value}."
        wait = round(KEYS_RETRY_AFTER * 1000) if identity is AccessRefusal.KEYS_UNAVAILABLE else None
        return Refusal(Status.UNAUTHORIZED, detail, retry_after_ms=wait)
    denial = check_grant(identity, Grant.SEND, key)
    if denial is None:
        return None
    detail = f"The {found.name} demands the grant send for the key {key!r}; {denial.refusal.value}."
    return Refusal(Status.FORBIDDEN, detail)


def _describe(arrival: Arrival, found: FoundPolicy | None) -> str | None:
    if found is None or not found.policy.authorization.demands_send:
        return None
    return f"{arrival.principal} has the grant send, which the {found.name} demands (Authorization)."


def unverifiable(manifest: PolicyManifest, bounds: Bounds) -> Iterator[Problem]:
    """The places of a document with demands that the pool cannot verify."""
    for path, policy in manifest.places:
        if (why := demands_unverifiable(policy, bounds)) is not None:
            yield Problem(why, path=f"{path}.{ELEMENT}")


def demands_unverifiable(policy: KeyPolicy, bounds: Bounds) -> str | None:
    """Why the pool cannot verify the demands of a proposal; None if it can."""
    given = policy.proposed.get("authorization", Authorization.NOT_REQUIRED)
    return unverifiable_demand(given, bounds)


def unverifiable_demand(given: Authorization, bounds: Bounds) -> str | None:
    """Why the pool cannot verify the demands of a value of Authorization; None if it can."""
    if given.demands_send and not bounds.verifies_tokens:
        return UNVERIFIABLE
    return UNAUTHORIZED_WORKERS if given.demands_receive and not bounds.authorizes_workers else None


UNVERIFIABLE = (
    "the pool has nothing to verify tokens with, so that every request would be refused: set api.tokens_file or "
    "api.jwt in the configuration of the daemon, and restart it"
)
UNAUTHORIZED_WORKERS = (
    "the pool cannot decide which workers receive requests, so that this would protect nothing: set worker.principal "
    "(the name of an API token), api.tokens_file and broker.scoped_credentials in the configuration of the daemon, "
    "with a driver that starts each worker, and restart it. Write RequiredToSend if only senders need a token"
)


class Claim(StrEnum):
    """A right of the sender for a key."""

    MANAGE = "Manage"
    LISTEN = "Listen"
    SEND = "Send"


_SEEN_WITH = {
    Discoverability.MANAGERS: {Claim.MANAGE},
    Discoverability.MANAGERS_LISTENERS: {Claim.MANAGE, Claim.LISTEN},
    Discoverability.MANAGERS_LISTENERS_SENDERS: {Claim.MANAGE, Claim.LISTEN, Claim.SEND},
}


def may_discover(discoverability: Discoverability, claims: Set[Claim]) -> bool:
    """Whether a sender with these claims for a key sees its queue."""
    return discoverability is Discoverability.PUBLIC or bool(claims & _SEEN_WITH[discoverability])
