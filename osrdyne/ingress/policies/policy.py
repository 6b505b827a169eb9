"""The effective policy of a key: every element with its value and the origin of the value.

A proposal names some elements. An element that it leaves out has the default; a value beyond the bounds of the pool is
moved to the nearest bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

KIB = 2**10
MAX_INT = 2**31
LEAST_MESSAGE_SIZE = 8 * KIB
DEFAULT_MESSAGE_SIZE = 60 * KIB
DEFAULT_MESSAGE_AGE = 600.0
LONGEST_MESSAGE_AGE = 7 * 86400.0
DEFAULT_ENQUEUE_TIMEOUT = 10.0
LONGEST_ENQUEUE_TIMEOUT = 60.0
DEFAULT_LIFETIME = timedelta(hours=24)
SHORTEST_LIFETIME = timedelta(seconds=30)
LONGEST_LIFETIME = timedelta(days=21)


class Origin(StrEnum):
    """The origin of a value of an effective policy."""

    PROPOSED = "proposed"
    DEFAULT = "default"
    CLAMPED = "clamped"
    COMPUTED = "computed"


class Authorization(StrEnum):
    """Who needs a token: senders, consumers, both or neither."""

    REQUIRED = "Required"
    REQUIRED_TO_SEND = "RequiredToSend"
    REQUIRED_TO_RECEIVE = "RequiredToReceive"
    NOT_REQUIRED = "NotRequired"

    @property
    def demands_send(self) -> bool:
        """Whether senders need a token with the grant `send`."""
        return self in (Authorization.REQUIRED, Authorization.REQUIRED_TO_SEND)

    @property
    def demands_receive(self) -> bool:
        """Whether the principal of the workers needs the grant `listen`."""
        return self in (Authorization.REQUIRED, Authorization.REQUIRED_TO_RECEIVE)


class Discoverability(StrEnum):
    """Who sees the queue in the registry."""

    MANAGERS = "Managers"
    MANAGERS_LISTENERS = "ManagersListeners"
    MANAGERS_LISTENERS_SENDERS = "ManagersListenersSenders"
    PUBLIC = "Public"


class TransportProtection(StrEnum):
    """Whether HTTP must be protected by TLS."""

    ALL_PATHS = "AllPaths"
    NONE = "None"


class Overflow(StrEnum):
    """What happens to a request that finds no room in time."""

    REJECT_INCOMING = "RejectIncomingMessage"
    DISCARD_INCOMING = "DiscardIncomingMessage"
    DISCARD_EXISTING = "DiscardExistingMessage"


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a pool allows. `capacity`: bytes of one queue, None if the pool has no limit. `verifies_tokens`: whether it
    has tokens or keys of JWTs, so that a policy may demand them. `authorizes_workers`: whether the leader decides which
    workers receive requests, and RabbitMQ keeps others from it."""

    max_message_bytes: int
    delivery_limit: int
    capacity: int | None = None
    verifies_tokens: bool = False
    authorizes_workers: bool = False


@dataclass(frozen=True, slots=True)
class EffectivePolicy:
    """All elements of a policy. Durations in seconds, sizes in bytes, `expiration_instant` in UTC.

    `poison_message_drop` None: the poison inventory alone. `origins`: by field name.
    """

    authorization: Authorization
    discoverability: Discoverability
    expiration_instant: datetime
    max_message_size: int
    transport_protection: TransportProtection
    enqueue_timeout: float
    max_concurrent_readers: int
    max_dequeue_retries: int
    max_message_age: float
    max_queue_length: int
    max_queue_capacity: int
    overflow: Overflow
    poison_message_drop: str | None
    origins: Mapping[str, Origin]


def effective_policy(proposed: Mapping[str, Any], *, bounds: Bounds, now: datetime) -> EffectivePolicy:
    """Adjust a proposal (values by field name, of the right types) to the bounds of the pool. `now`: an aware time."""
    adjust = _Adjustment(proposed)
    now = now.astimezone(UTC)
    largest = max(LEAST_MESSAGE_SIZE, bounds.max_message_bytes)
    size = adjust.number("max_message_size", min(DEFAULT_MESSAGE_SIZE, largest), LEAST_MESSAGE_SIZE, largest)
    length = adjust.number("max_queue_length", MAX_INT, 1, MAX_INT)
    adjust.origins["max_queue_capacity"] = Origin.COMPUTED
    return EffectivePolicy(
        authorization=adjust.choice("authorization", Authorization.NOT_REQUIRED),
        discoverability=adjust.choice("discoverability", Discoverability.MANAGERS),
        expiration_instant=adjust.number(
            "expiration_instant", now + DEFAULT_LIFETIME, now + SHORTEST_LIFETIME, now + LONGEST_LIFETIME
        ),
        max_message_size=size,
        transport_protection=adjust.choice("transport_protection", TransportProtection.ALL_PATHS),
        enqueue_timeout=adjust.number("enqueue_timeout", DEFAULT_ENQUEUE_TIMEOUT, 0.0, LONGEST_ENQUEUE_TIMEOUT),
        max_concurrent_readers=adjust.number("max_concurrent_readers", MAX_INT, 1, MAX_INT),
        max_dequeue_retries=adjust.number("max_dequeue_retries", bounds.delivery_limit, 1, MAX_INT),
        max_message_age=adjust.number("max_message_age", DEFAULT_MESSAGE_AGE, 0.0, LONGEST_MESSAGE_AGE),
        max_queue_length=length,
        max_queue_capacity=min(length * size, 2**63 - 1 if bounds.capacity is None else bounds.capacity),
        overflow=adjust.choice("overflow", Overflow.REJECT_INCOMING),
        poison_message_drop=adjust.choice("poison_message_drop", None),
        origins=adjust.origins,
    )


class _Adjustment:
    """Reads values of a proposal and records the origin of each."""

    def __init__(self, proposed: Mapping[str, Any]) -> None:
        self._proposed = proposed
        self.origins: dict[str, Origin] = {}

    def choice(self, name: str, default: Any) -> Any:
        """A value without bounds."""
        given = self._proposed.get(name)
        self.origins[name] = Origin.DEFAULT if given is None else Origin.PROPOSED
        return default if given is None else given

    def number(self, name: str, default: Any, lowest: Any, highest: Any) -> Any:
        """A value between two bounds."""
        given = self._proposed.get(name)
        if given is None:
            self.origins[name] = Origin.DEFAULT
            return default
        value = min(max(given, lowest), highest)
        self.origins[name] = Origin.PROPOSED if value == given else Origin.CLAMPED
        return value
