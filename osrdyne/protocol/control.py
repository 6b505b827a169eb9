"""Control messages from the controller to workers. Source: docs/reference/protocol/reports.md, "Control messages"."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

MAX_TERM = 2**53
"""No leader reaches it. Every JSON parser and every metric can represent it."""
TERM_AHEAD = 86_400
"""How far a term may be ahead of the seconds since the epoch, because clocks may differ. Terms themselves are never
ahead: they count from 1, or from the clock after the loss of the leader queue (`broker.leadership.token`)."""


def is_plausible_term(term: int, *, now: float) -> bool:
    """Whether a leader may have this term at `now`, in seconds since the epoch."""
    return 0 <= term <= min(now + TERM_AHEAD, MAX_TERM)


class Generation(NamedTuple):
    """(term, counter): the leader's term, and the count of changes of the expected state within it.

    Tuples compare in order, so a newer leader's messages win over an older one's (lifecycle: generations).
    """

    term: int
    counter: int

    def __str__(self) -> str:
        return f"{self.term}.{self.counter}"


class Command(StrEnum):
    PAUSE = "pause"
    RESUME = "resume"
    PROBE = "probe"
    CANCEL = "cancel"
    DRAIN = "drain"
    QUEUES = "queues"
    POISON = "poison"
    RELOAD = "reload"
    RATE = "rate"
    RECONNECT = "reconnect"
    ASSIGN = "assign"
    RELEASE = "release"
    FORGET = "forget"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """One control message. `details`: for `cancel` `correlation_id` and `reply_to`; for `queues` `queues`; for `poison`
    `texts`, the text fingerprints to refuse, each with the seconds for which to refuse it; for `rate` `rate`
    (`protocol.rates`); for `reload` and `probe` `id`, which the report of the outcome repeats; for `assign`, `release`,
    `forget` and `state` see `protocol.pooled`. They are not in the repr, because `assign` contains the AMQP URI.

    A worker answers every `pause` and `resume` with a report of its state. From these reports a new leader learns which
    workers are ready.
    """

    command: Command
    generation: Generation
    details: Mapping[str, object] = field(default_factory=dict, repr=False)

    def wire_body(self) -> bytes:
        return json.dumps({"command": str(self.command), "generation": list(self.generation), **self.details}).encode()


def control_from_wire(body: bytes) -> ControlMessage | None:
    """Parse a control message; None if malformed."""
    try:
        decoded = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(decoded, dict) or decoded.get("command") not in list(Command):
        return None
    generation = decoded.get("generation")
    match generation:
        case [int(term), int(counter)]:
            details = {name: value for name, value in decoded.items() if name not in {"command", "generation"}}
            return ControlMessage(Command(decoded["command"]), Generation(term, counter), details)
        case _:
            return None
