"""Why a worker exits, and with which code. Operators see both: docs/reference/workers/runtime.md."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    STOPPED = 0
    """Stopped on request (SIGTERM, SIGINT, drain)."""
    START_FAILED = 1
    """The session or `on_start` failed."""
    INVALID_CONFIGURATION = 2
    """The environment or the application is invalid."""
    QUEUE_MISSING = 3
    """A request queue was missing for `queue_missing_timeout`."""
    UNRECOVERABLE = 4
    """A handler does not end, the session is lost, or the runtime itself failed."""
    ACCESS_REFUSED = 5
    """RabbitMQ refused the log-in for `queue_missing_timeout`: the next worker may get other credentials."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A requested stop. Running requests have `grace` seconds; None: no limit (drain)."""

    grace: float | None
    code: ClassVar[ExitCode] = ExitCode.STOPPED


@dataclass(frozen=True, slots=True)
class StartFailed:
    reason: str
    code: ClassVar[ExitCode] = ExitCode.START_FAILED


@dataclass(frozen=True, slots=True)
class InvalidConfiguration:
    reason: str
    code: ClassVar[ExitCode] = ExitCode.INVALID_CONFIGURATION


@dataclass(frozen=True, slots=True)
class QueueMissing:
    reason: str
    code: ClassVar[ExitCode] = ExitCode.QUEUE_MISSING


@dataclass(frozen=True, slots=True)
class Unrecoverable:
    reason: str
    code: ClassVar[ExitCode] = ExitCode.UNRECOVERABLE


@dataclass(frozen=True, slots=True)
class AccessRefused:
    reason: str
    code: ClassVar[ExitCode] = ExitCode.ACCESS_REFUSED


ExitReason = Stop | StartFailed | InvalidConfiguration | QueueMissing | Unrecoverable | AccessRefused
