"""The lifetime of a created queue: its record, and when it ends. Pure.

A client proposes a policy for the queue of a key. The queue lives until its expiration instant, which a renewal moves.
Then the queue is removed, with its record and the policy in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from osrdyne.errors import InvalidKeyError
from osrdyne.ingress.acceptance import RoutedRequest
from osrdyne.ingress.checks import DeliveryCheck, Refusal
from osrdyne.ingress.requests import Arrival
from osrdyne.protocol.names import Key, parse_key
from osrdyne.protocol.statuses import Status


class LifetimeState(StrEnum):
    """ALIVE until the expiration instant or a deletion; then ENDING, until the queue and its workers are gone."""

    ALIVE = "alive"
    ENDING = "ending"


class EndReason(StrEnum):
    DELETED = "deleted"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class CreatedQueue:
    """The record of a queue that was created for a key.

    `proposal`: the elements that the client proposed, by their names in a document, without ExpirationInstant. Times
    are seconds since the epoch; `renewed_at`: when the client proposed them. `reason`: why it ends.
    """

    key: Key
    proposal: Mapping[str, Any] = field(repr=False)
    author: str
    created_at: float
    renewed_at: float
    expires_at: float
    state: LifetimeState = LifetimeState.ALIVE
    reason: EndReason | None = None

    @property
    def is_ending(self) -> bool:
        return self.state is LifetimeState.ENDING

    def ending(self, reason: EndReason) -> CreatedQueue:
        return self if self.is_ending else replace(self, state=LifetimeState.ENDING, reason=reason)

    def stored(self) -> dict[str, Any]:
        """The record as a JSON value."""
        return {
            "key": self.key,
            "proposal": dict(self.proposal),
            "author": self.author,
            "created_at": self.created_at,
            "renewed_at": self.renewed_at,
            "expires_at": self.expires_at,
            "state": self.state.value,
            "reason": None if self.reason is None else self.reason.value,
        }


def read_record(value: object) -> CreatedQueue | None:
    """The record in a stored value; None if malformed: another program may have written it."""
    match value:
        case {
            "key": str(text),
            "proposal": dict(proposal),
            "author": str(author),
            "created_at": int() | float() as created_at,
            "renewed_at": int() | float() as renewed_at,
            "expires_at": int() | float() as expires_at,
            "state": str(state),
            "reason": str() | None as reason,
        }:
            try:
                return CreatedQueue(
                    parse_key(text),
                    proposal,
                    author,
                    float(created_at),
                    float(renewed_at),
                    float(expires_at),
                    LifetimeState(state),
                    None if reason is None else EndReason(reason),
                )
            except (InvalidKeyError, ValueError):
                return None
        case _:
            return None


def instant_text(seconds: float) -> str:
    """`2026-01-31T12:00:00Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class Countdown:
    """When a queue expires, on both clocks of this leader. `expires_at` is an instant of the wall clock (seconds since
    the epoch); `runs_until` (monotonic) is the same moment as it was when the leader noted it.

    A queue is over when both have passed. So a wall clock that jumps forward removes no queue early, and one that jumps
    back keeps a queue for no longer than the jump.
    """

    expires_at: float
    runs_until: float

    @classmethod
    def begin(cls, expires_at: float, *, wall: float, monotonic: float) -> Countdown:
        return cls(expires_at, monotonic + max(0.0, expires_at - wall))

    def is_over(self, *, wall: float, monotonic: float) -> bool:
        return wall >= self.expires_at and monotonic >= self.runs_until

    def due_in(self, *, wall: float, monotonic: float) -> float:
        """Seconds after which to check again at the latest; 0 if it is over."""
        return max(0.0, self.expires_at - wall, self.runs_until - monotonic)


def removal_detail(reason: EndReason | None) -> str:
    """The detail of the answer `gone`."""
    happened = "has expired" if reason is EndReason.EXPIRED else "was deleted"
    return f"The queue of this key {happened} and is being removed. Send the request again when it is gone."


RecordOf = Callable[[Key], CreatedQueue | None]


def refuse_removed(record: CreatedQueue | None) -> Refusal | None:
    """The refusal of a request for a key with this record; None unless its queue is being removed."""
    if record is None or not record.is_ending:
        return None
    return Refusal(Status.GONE, removal_detail(record.reason))


def removal_check(record_of: RecordOf) -> DeliveryCheck:
    """The check of queues that are being removed, by the key of the group."""

    def describe(arrival: Arrival, routed: RoutedRequest) -> str | None:
        record = record_of(routed.key)
        return None if record is None else f"The queue of {routed.key!r} expires at {instant_text(record.expires_at)}."

    return DeliveryCheck(
        "removal", lambda arrival, routed, now_ms: refuse_removed(record_of(routed.key)), describe=describe
    )
