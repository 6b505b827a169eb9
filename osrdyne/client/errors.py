"""The errors of requests: one class for each `x-status` except `ok`, and those that the client itself detects.

Raised by `aio` and `blocking`; built from a reply by `error_from_reply`, which is pure. `retryable`: whether the same
request may succeed later. Source: docs/reference/protocol/responses.md.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from osrdyne.client.reply import Reply
from osrdyne.errors import OsrdyneError
from osrdyne.protocol.statuses import CODES, Status


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """The body of an `error` reply, `{"error": {…}}`; `details`: all its other members."""

    code: str = ""
    message: str = ""
    path: str = ""
    details: Mapping[str, object] = field(default_factory=dict)


class RequestError(OsrdyneError):
    """A request did not end with `ok`. `reply`: its answer; None if no answer came."""

    summary: ClassVar[str] = "The request failed"

    def __init__(self, message: str, *, reply: Reply | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.reply = reply

    @property
    def status(self) -> str | None:
        """The answer's `x-status`."""
        return None if self.reply is None else str(self.reply.status)

    @property
    def code(self) -> int | None:
        """The `x-code` of the answer, or the code of its status."""
        if self.reply is None:
            return None
        if self.reply.code is not None:
            return self.reply.code
        return CODES[Status(self.reply.status)] if self.reply.status in CODES else None

    @property
    def attempts(self) -> int | None:
        """How often a worker tried the request, according to the answer; None without an answer."""
        return None if self.reply is None else self.reply.attempts

    @property
    def detail(self) -> str | None:
        """The cause and the remedy, as text."""
        return None if self.reply is None else self.reply.detail

    @property
    def worker_id(self) -> str | None:
        return None if self.reply is None else self.reply.worker_id

    @property
    def retry_after(self) -> float | None:
        """Seconds after which a retry may succeed; None if the answer gives none."""
        return None if self.reply is None else self.reply.retry_after

    @property
    def error(self) -> ErrorBody:
        """The structured error in the body of the answer; empty if the body has none."""
        return _error_body(self.reply)


class RequestFailedError(RequestError):
    """The handler failed or refused the request; `error` has the cause."""

    summary = "The request failed"


class RequestExpiredError(RequestError):
    """The deadline passed before the request was completed; the worker or the controller answered so."""

    retryable = True
    summary = "The request expired"


class RequestRejectedError(RequestError):
    """A consumer rejected the request without requeueing."""

    summary = "The request was rejected"


class RequestQueueFullError(RequestError):
    """The request queue has reached its limit: the request was dropped, or RabbitMQ refused it (`reply` is None)."""

    retryable = True
    summary = "The request queue is full"


class UnauthorizedError(RequestError):
    """The policy of the key demands a token, and the request has no valid one; `detail` contains the reason."""

    summary = "The request needs a token"


class ForbiddenError(RequestError):
    """The token does not allow requests to this key."""

    summary = "The token does not allow the request"


class RequestTooLargeError(RequestError):
    """The request is larger than the queue policy of its key allows."""

    summary = "The request is too large"


class QuotaExceededError(RequestError):
    """A daily quota of the pool is used up. `retry_after`: seconds until the quota is reset or has room."""

    retryable = True
    summary = "The daily quota is used up"


class RateLimitedError(RequestError):
    """Requests were sent faster than the pool allows. `retry_after`: seconds until the next one may be sent."""

    retryable = True
    summary = "Requests are sent too fast"


class QueueGoneError(RequestError):
    """The queue of the key expired or was deleted while the request waited."""

    retryable = True
    summary = "The queue of the key was removed"


class RequestPoisonedError(RequestError):
    """Workers ended while they ran requests with this path and body, so the pool refuses such requests for a while."""

    summary = "The request ends workers"


class DeliveryLimitError(RequestError):
    """The request was delivered as often as the pool allows, and no worker finished it."""

    summary = "The request was tried too often"


class RequestCancelledError(RequestError):
    """The request was cancelled by its client."""

    summary = "The request was cancelled"


class StartFailedError(RequestError):
    """The worker for this key could not be started; `log_lines`: its last log lines."""

    retryable = True
    summary = "The worker could not be started"

    @property
    def log_lines(self) -> tuple[str, ...]:
        lines = self.error.details.get("log_lines")
        if isinstance(lines, list):
            return tuple(str(line) for line in lines)
        return tuple((self.detail or "").splitlines()[1:])


class NoCapacityError(RequestError):
    """Too many keys wait for room in the pool."""

    retryable = True
    summary = "The pool has no room for another key"


class NotRunningError(RequestError):
    """No worker runs for the key, and the request was sent with `no_activate`."""

    summary = "No worker is running for this key"


class InvalidRequestError(RequestError):
    """The request is malformed, or is refused for another reason that a retry does not change."""

    summary = "The request is not valid"


class CircuitOpenError(RequestError):
    """Too many requests of the route fail, so its circuit is open. `retry_after`: seconds until a retry may succeed, if
    known."""

    retryable = True
    summary = "The circuit of the route is open"


class NoRouteError(RequestError):
    """No route of a managed pool matches the request; `osrdyne explain` shows why."""

    summary = "No route takes the request"


class UnknownStatusError(RequestError):
    """The answer has an `x-status` that this version of the client does not know; see `status` and `detail`."""

    summary = "The request ended with an unknown status"


class RequestTimeoutError(RequestError):
    """No answer came by the deadline plus `answer_slack`. `sent`: whether the request was sent."""

    retryable = True

    def __init__(self, message: str, *, sent: bool, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.sent = sent


class ConnectionLostError(RequestError):
    """The connection was lost before the answer: whether the request was or will be processed is unknown."""

    retryable = True


class StreamInterruptedError(RequestError):
    """A streamed answer was interrupted: its worker, or one of its parts, was lost. The rows received so far are
    incomplete; to get all of them, send the request again."""

    retryable = True


class RequestRefusedError(RequestError):
    """RabbitMQ refused the request: the pool has neither a queue for the key nor one for orphans."""

    retryable = True


class PoolNotFoundError(RequestError):
    """The pool does not exist on this broker."""


class ClientClosedError(RequestError):
    """The client is closed, or was never opened."""


_BY_STATUS: dict[str, type[RequestError]] = {
    Status.ERROR: RequestFailedError,
    Status.EXPIRED: RequestExpiredError,
    Status.REJECTED: RequestRejectedError,
    Status.MAXLEN: RequestQueueFullError,
    Status.DELIVERY_LIMIT: DeliveryLimitError,
    Status.POISON: RequestPoisonedError,
    Status.CANCELLED: RequestCancelledError,
    Status.START_FAILED: StartFailedError,
    Status.CAPACITY: NoCapacityError,
    Status.NOT_RUNNING: NotRunningError,
    Status.INVALID: InvalidRequestError,
    Status.UNAUTHORIZED: UnauthorizedError,
    Status.FORBIDDEN: ForbiddenError,
    Status.NO_ROUTE: NoRouteError,
    Status.TOO_LARGE: RequestTooLargeError,
    Status.QUEUE_FULL: RequestQueueFullError,
    Status.QUOTA_EXCEEDED: QuotaExceededError,
    Status.RATE_LIMITED: RateLimitedError,
    Status.GONE: QueueGoneError,
    Status.CIRCUIT_OPEN: CircuitOpenError,
}


def error_from_reply(reply: Reply, *, key: str, path: str) -> RequestError | None:
    """The error for a terminal reply; None for `ok`."""
    if reply.ok:
        return None
    kind = _BY_STATUS.get(reply.status, UnknownStatusError)
    summary = kind.summary if kind is not UnknownStatusError else f"{kind.summary}, {str(reply.status)!r}"
    body = _error_body(reply)
    reason = body.message or (reply.detail or "").partition("\n")[0]
    named = f"{summary} ({body.code})" if body.code and body.code != reply.status else summary
    return kind(f"{named}: {reason}" if reason else f"{named}.", reply=reply, key=key, path=path)


def _error_body(reply: Reply | None) -> ErrorBody:
    try:
        decoded = json.loads(reply.body) if reply is not None and reply.body else None
    except (ValueError, RecursionError):
        decoded = None
    body = decoded.get("error") if isinstance(decoded, dict) else None
    if not isinstance(body, dict):
        return ErrorBody()
    named = {name: str(body[name]) for name in ("code", "message", "path") if body.get(name) is not None}
    return ErrorBody(**named, details={name: value for name, value in body.items() if name not in named})


RENAMED = {
    "ClientClosed": "ClientClosedError",
    "ConnectionLost": "ConnectionLostError",
    "DeliveryLimitReached": "DeliveryLimitError",
    "InvalidRequest": "InvalidRequestError",
    "NoCapacity": "NoCapacityError",
    "NoRoute": "NoRouteError",
    "NotRunning": "NotRunningError",
    "PoolNotFound": "PoolNotFoundError",
    "QueueFull": "RequestQueueFullError",
    "RequestCancelled": "RequestCancelledError",
    "RequestExpired": "RequestExpiredError",
    "RequestFailed": "RequestFailedError",
    "RequestPoisoned": "RequestPoisonedError",
    "RequestRefused": "RequestRefusedError",
    "RequestRejected": "RequestRejectedError",
    "RequestTimeout": "RequestTimeoutError",
    "StartFailed": "StartFailedError",
    "UnknownStatus": "UnknownStatusError",
}
"""Earlier names of errors, kept for one release."""


def renamed(module: str, name: str, values: Mapping[str, Any]) -> Any:
    """Resolve an earlier name of an error, with a warning; for the `__getattr__` of a module."""
    if name not in RENAMED:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warnings.warn(f"{module}.{name} is now called {RENAMED[name]}.", DeprecationWarning, stacklevel=3)
    return values[RENAMED[name]]


def __getattr__(name: str) -> Any:
    return renamed(__name__, name, globals())
