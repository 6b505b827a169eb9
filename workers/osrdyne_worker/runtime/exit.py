"""How a worker ends: its exit codes, and the reasons that lead to them.

Part of what operators see: docs/reference/workers/runtime.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    STOPPED = 0
    """Asked to stop (SIGTERM, SIGINT, drain), and done so."""
    START_FAILED = 1
    """The session or `on_start` failed."""
    WRONG_CONFIGURATION = 2
    """The environment or the application cannot be used."""
    QUEUE_MISSING = 3
    """A request queue was missing for `queue_missing_timeout`."""
    BEYOND_HELP = 4
    """A handler does not end, the session is lost, or the runtime itself failed."""
    ACCESS_REFUSED = 5
    """RabbitMQ refused the log-in for `queue_missing_timeout`: the next worker may get other credentials."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Asked to stop. `grace` seconds for what runs; None: as long as it takes (drain)."""

    grace: float | None
    code: ClassVar[ExitCode] = ExitCode.STOPPED


@dataclass(frozen=True, slots=True)
class StartFailed:
    reason: str
    code: ClassVar[ExitCode] = ExitCode.START_FAILED


@dataclass(frozen=True, slots=True)
class WrongConfiguration:
    reason: str
    code: ClassVar[ExitCode] = ExitCode.WRONG_CONFIGURATION


@dataclass(frozen=True, slots=True)
class QueueMissing:
    reason: str
    code: ClassVar[ExitCode] = ExitCode.QUEUE_MISSING


@dataclass(frozen=True, slots=True)
class BeyondHelp:
    reason: str
    code: ClassVar[ExitCode] = ExitCode.BEYOND_HELP


@dataclass(frozen=True, slots=True)
class AccessRefused:
    reason: str
    code: ClassVar[ExitCode] = ExitCode.ACCESS_REFUSED


Ending = Stop | StartFailed | WrongConfiguration | QueueMissing | BeyondHelp | AccessRefused
