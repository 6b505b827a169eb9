"""The poison inventory as daemon and clients see it. Source: docs/reference/http-api/index.md, `/v1/poison`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """A worker that ended by itself while it ran requests.

    `ended_with`: exit code or signal. `said`: the worker's own reason. `at`: seconds since the epoch. `others`: number
    of requests that ran beside the one for which the death is evidence.
    """

    worker_id: str
    ended_with: str
    said: str | None
    at: float
    log_lines: tuple[str, ...]
    others: int = 0


@dataclass(frozen=True, slots=True)
class PoisonRecord:
    """One entry of the poison inventory: a request whose every delivery failed, or that killed two workers.

    `key`, `deliveries` and the times (seconds since the epoch) are None if they are unknown, as of a message that
    osrdyne did not put there. `deliveries` is RabbitMQ's count. `finding` is a sentence about what the deaths mean,
    `replays` the number of earlier replays. `body` is None in a list without bodies.
    """

    id: str
    key: str | None
    path: str
    correlation_id: str | None
    reply_to: str | None
    message_id: str | None
    app_id: str | None
    content_type: str | None
    reason: str
    deliveries: int | None
    deaths: tuple[WorkerDeath, ...]
    finding: str
    replays: int
    first_at: float | None
    last_at: float | None
    size_bytes: int
    headers: Mapping[str, object]
    body: bytes | None

    @property
    def unexplained(self) -> int | None:
        """Deliveries that are not explained by a known death."""
        return None if self.deliveries is None else max(0, self.deliveries - len(self.deaths))

    @property
    def body_encoding(self) -> Literal["text", "base64"] | None:
        """How the body is written in JSON: as text if it is UTF-8. None in a list without bodies."""
        if self.body is None:
            return None
        try:
            self.body.decode("utf-8")
        except UnicodeDecodeError:
            return "base64"
        return "text"


@dataclass(frozen=True, slots=True)
class PoisonOutcome:
    """The result of an action by entry id: done, missing, or refused with the reason."""

    done: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
