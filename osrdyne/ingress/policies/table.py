"""The effective policies of a document in one pool, by key. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from osrdyne.config.models import Settings
from osrdyne.ingress.documents.problems import InvalidDocumentError, Problem
from osrdyne.ingress.policies.elements import BY_FIELD, ELEMENTS
from osrdyne.ingress.policies.manifest import CAPACITY, COMPUTED, KeyPolicy, PolicyManifest
from osrdyne.ingress.policies.policy import Bounds, EffectivePolicy, Origin, effective_policy

MAX_CACHED = 100_000
"""Keys whose policy is cached; with more, the cache is cleared."""


@dataclass(frozen=True, slots=True)
class FoundPolicy:
    """The policy of a key. `match`: the pattern; None: the default of the document. `is_own`: the policy of a created
    queue, which takes precedence over the document."""

    match: str | None
    policy: EffectivePolicy
    is_own: bool = False

    @property
    def name(self) -> str:
        """The policy, as a part of a sentence."""
        if self.is_own:
            return "policy of the created queue"
        return "default policy" if self.match is None else f"policy {self.match!r}"


class PolicyTable:
    """The policies of a document, adjusted to the bounds of a pool at one moment."""

    def __init__(self, manifest: PolicyManifest, *, bounds: Bounds, now: datetime) -> None:
        listed = [policy for _, policy in manifest.places]
        self._found = [
            (policy, FoundPolicy(policy.match, effective_policy(policy.proposed, bounds=bounds, now=now)))
            for policy in listed
        ]
        self._cached: dict[str, FoundPolicy | None] = {}
        self._bounds = bounds

    def of(self, key: str) -> FoundPolicy | None:
        """The policy of a key; None if none acts on it."""
        if key in self._cached:
            return self._cached[key]
        found = next((found for policy, found in self._found if policy.matches(key)), None)
        if len(self._cached) >= MAX_CACHED:
            self._cached.clear()
        self._cached[key] = found
        return found

    def effective(self, key: str, *, now: datetime) -> FoundPolicy | None:
        """The policy of a key as of now: an expiration instant that is not given counts from now."""
        policy = next((policy for policy, _ in self._found if policy.matches(key)), None)
        if policy is None:
            return None
        return FoundPolicy(policy.match, effective_policy(policy.proposed, bounds=self._bounds, now=now))


def bounds_of(settings: Settings) -> Bounds:
    """What a pool with these settings allows."""
    requests = settings.requests
    return Bounds(
        max_message_bytes=requests.max_message_bytes,
        delivery_limit=requests.delivery_limit,
        capacity=requests.max_length_bytes,
        verifies_tokens=settings.api.tokens_file is not None or settings.api.jwt.algorithm is not None,
        authorizes_workers=None not in (settings.worker.principal, settings.api.tokens_file)
        and settings.broker.scoped_credentials,
    )


def without_capacity(
    proposal: KeyPolicy, *, bounds: Bounds, now: datetime, returned: EffectivePolicy | None = None
) -> KeyPolicy:
    """The proposal without MaxQueueCapacity, which may only repeat the value that the pool has `returned`, or that it
    computes from the proposal. Raises `InvalidDocumentError`."""
    given = proposal.proposed.get(CAPACITY)
    known = [effective_policy(proposal.proposed, bounds=bounds, now=now), *([] if returned is None else [returned])]
    if given is not None and given not in {policy.max_queue_capacity for policy in known}:
        raise InvalidDocumentError([Problem(COMPUTED, path=BY_FIELD[CAPACITY].name)])
    return replace(proposal, proposed={name: value for name, value in proposal.proposed.items() if name != CAPACITY})


def warn_of_clamped(manifest: PolicyManifest, *, bounds: Bounds, now: datetime) -> Iterator[Problem]:
    """Warn of values that the pool moves to its bounds."""
    for path, policy in manifest.places:
        effective = effective_policy(policy.proposed, bounds=bounds, now=now)
        for name, origin in effective.origins.items():
            if origin is Origin.CLAMPED:
                element = BY_FIELD[name]
                used = shown(effective)[element.name]["value"]
                message = f"{used} is used instead: the element has the bounds {element.bounds}".replace("`", "")
                yield Problem(message, path=f"{path}.{element.name}")


def shown(policy: EffectivePolicy) -> dict[str, dict[str, object]]:
    """The policy as JSON values: for each element its value and where it comes from.

    `acts` is true for all of them. Earlier versions did not enforce every element, and clients may read it.
    """
    return {
        element.name: {
            "value": None if (value := getattr(policy, element.field)) is None else element.show(value),
            "origin": policy.origins[element.field].value,
            "acts": True,
        }
        for element in ELEMENTS
    }
