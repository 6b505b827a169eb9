"""Entries of the poison inventory, for daemon and clients. Source: docs/reference/http-api/index.md, `/v1/poison`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """A worker that ended by itself while it ran requests.

    `ended_with`: exit code or signal. `said`: the reason that the worker reported. `at`: seconds since the epoch.
    `others`: number of requests that ran at the same time as the one for which the death is evidence.
    """

    worker_id: str
    ended_with: str
    said: str | None
    at: float
    log_lines: tuple[str, ...]
    others: int = 0


@dataclass(frozen=True, slots=True)
class PoisonRecord:
    """One entry of the poison inventory: a request that failed in every delivery, or that ended two workers.

    `key`, `deliveries` and the times (seconds since the epoch) are None if they are unknown, for example of a message
    that osrdyne did not store. `deliveries` is RabbitMQ's count. `finding` is a sentence about the meaning of the
    deaths, `replays` the number of earlier replays. `body` is None in a list without bodies.
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
        """Deliveries without a known death."""
        return None if self.deliveries is None else max(0, self.deliveries - len(self.deaths))

    @property
    def body_encoding(self) -> Literal["text", "base64"] | None:
        """The encoding of the body in JSON: text if it is UTF-8. None in a list without bodies."""
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
