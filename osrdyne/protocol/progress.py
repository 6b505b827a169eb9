"""Inquiries about a starting key, and their answers: position in the queue of starts and expected time. And the
progress of the jobs of a request.

A client that requested progress sends inquiries for its key while a call has no reply. Pure.
Source: docs/reference/protocol/progress.md.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
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

JOB_PROGRESS_INTERVAL = 1.0
"""Seconds between two progress replies about the jobs of a request."""


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The jobs of one request in the session of its worker (Spark).

    `jobs`: those that run now. The other numbers are of all its jobs so far; the totals grow when it begins another
    one. `rows`: rows read by its stages, which may be some seconds old.
    """

    jobs: int = 0
    stages_done: int = 0
    stages_total: int = 0
    tasks_done: int = 0
    tasks_total: int = 0
    rows: int = 0

    def to_json(self) -> bytes:
        """The body of the reply."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """Parse the body of a reply; numbers that are missing or invalid are 0."""
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            value = None
        found = value if isinstance(value, dict) else {}
        numbers = {field.name: found.get(field.name) for field in fields(cls)}
        return cls(**{name: n for name, n in numbers.items() if isinstance(n, int) and not isinstance(n, bool)})

    def __str__(self) -> str:
        """A sentence for people."""
        return (
            f"{self.tasks_done:,} of {self.tasks_total:,} tasks, {self.stages_done} of {self.stages_total} stages, "
            f"{self.rows:,} rows read"
        )


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
