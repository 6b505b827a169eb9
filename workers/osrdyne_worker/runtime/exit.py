"""Why a worker exits, and with which code. Operators see both: docs/reference/workers/runtime.md."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from osrdyne.protocol.refusals import KeyRefusal


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
    NO_BROKER = 6
    """There was no connection to RabbitMQ for `no_broker_timeout`."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A requested stop. Running requests have `grace` seconds; None: no limit (drain)."""

    grace: float | None
    code: ClassVar[ExitCode] = ExitCode.STOPPED


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the worker cannot continue, in a sentence for operators."""

    reason: str
    code: ClassVar[ExitCode]


@dataclass(frozen=True, slots=True)
class StartFailed(Failure):
    """`refusal`: the error with which the application refuses the key, if it does."""

    refusal: KeyRefusal | None = None
    code: ClassVar[ExitCode] = ExitCode.START_FAILED


class InvalidConfiguration(Failure):
    __slots__ = ()
    code = ExitCode.INVALID_CONFIGURATION


class QueueMissing(Failure):
    __slots__ = ()
    code = ExitCode.QUEUE_MISSING


class Unrecoverable(Failure):
    __slots__ = ()
    code = ExitCode.UNRECOVERABLE


@dataclass(frozen=True, slots=True)
class LoopBlocked(Failure):
    """`text`: the text fingerprint of the request whose handler blocks the event loop, if it is known."""

    text: str | None = None
    code: ClassVar[ExitCode] = ExitCode.UNRECOVERABLE


class AccessRefused(Failure):
    __slots__ = ()
    code = ExitCode.ACCESS_REFUSED


class NoBroker(Failure):
    __slots__ = ()
    code = ExitCode.NO_BROKER


ExitReason = Stop | Failure
