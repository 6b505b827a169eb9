"""Inquiries about a starting key, and their answers: position in the queue of starts and expected time.

A client that requested progress sends inquiries for its key while a call has no reply. Pure.
Source: docs/reference/protocol/progress.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Self

STARTING = "starting"
RUNNING = "running"
FIRST_INQUIRY = 1.0
"""Seconds that a call waits for its first reply before the client sends an inquiry; most calls end before."""
STARTING_INTERVAL = 2.0
"""Seconds between two inquiries about a key that is starting."""
RUNNING_INTERVAL = 15.0
"""The same about a key that is not starting: its worker may end, and the next one start, while the call waits."""
INQUIRY_TTL_MS = 5_000
"""After this time RabbitMQ drops an inquiry that no leader has read: the client has sent another one."""


@dataclass(frozen=True, slots=True)
class StartProgress:
    """The start of a worker for which a caller waits.

    `position`: the position in the queue of starts, 1 for the next; 0: the worker is starting. `eta_s`: seconds until
    the worker is ready, None if unknown. `waiting_for`: the setting that limits the starts, or the resource for which
    the worker waits; None if it waits for neither.
    """

    position: int
    eta_s: float | None = None
    waiting_for: str | None = None

    def to_json(self) -> bytes:
        """The body of the answer."""
        eta = None if self.eta_s is None else round(self.eta_s, 1)
        value = {"state": STARTING, "position": self.position, "eta_s": eta, "waiting_for": self.waiting_for}
        return json.dumps(value, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, body: bytes) -> Self | None:
        """Parse an answer; None for a key that is not starting, and for any other body."""
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or value.get("state") != STARTING:
            return None
        position, eta, waiting_for = value.get("position"), value.get("eta_s"), value.get("waiting_for")
        if not isinstance(position, int) or isinstance(position, bool) or position < 0:
            return None
        return cls(
            position,
            float(eta) if isinstance(eta, int | float) and not isinstance(eta, bool) else None,
            waiting_for if isinstance(waiting_for, str) else None,
        )

    def __str__(self) -> str:
        """A sentence for people."""
        text = "the worker is starting" if self.position == 0 else f"start {self.position} in the queue"
        if self.waiting_for is not None:
            text += f", waiting for {self.waiting_for}"
        return text if self.eta_s is None else f"{text}; ready in about {self.eta_s:.0f} s"


def not_starting() -> bytes:
    """The body of the answer for a key that is not starting."""
    return json.dumps({"state": RUNNING}, separators=(",", ":")).encode()
