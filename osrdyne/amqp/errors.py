"""Translation of the exceptions of aiormq, which aio-pika raises too, into those of `osrdyne.errors`.

It matches exception classes and reply codes, never texts (broker: one-channel-for-commands).
"""

from __future__ import annotations

import asyncio
import errno
import socket
from types import TracebackType

from aio_pika.exceptions import (
    AMQPConnectionError,
    AMQPError,
    AuthenticationError,
    ChannelClosed,
    ChannelInvalidStateError,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    DeliveryError,
    ProbableAuthenticationError,
    PublishError,
)
from aiormq.exceptions import (
    ChannelAccessRefused,
    ChannelLockedResource,
    ConnectionInternalError,
    ConnectionNotAllowed,
)

from osrdyne.amqp.tls import describe_tls_error
from osrdyne.errors import (
    BrokerAccessError,
    BrokerConflictError,
    BrokerError,
    BrokerInternalError,
    BrokerNotFoundError,
    BrokerSilentError,
    BrokerUnavailableError,
    OsrdyneError,
    PublishRefusedError,
    QueueFullError,
)
from osrdyne.logs import mask_uri

_ADDRESS_ERRORS = {
    socket.EAI_NONAME: "the host name does not exist",
    socket.EAI_AGAIN: "the host name could not be resolved (is the network up?)",
}
_NETWORK_ERRORS = {
    errno.ECONNREFUSED: "nothing listens on this port (is RabbitMQ running?)",
    errno.EHOSTUNREACH: "there is no route to this host",
    errno.ENETUNREACH: "there is no route to this network",
    errno.ETIMEDOUT: "there was no answer (does a firewall block the port?)",
    errno.ECONNRESET: "the connection was reset",
    errno.EPIPE: "the connection was closed",
}


def translate_error(error: BaseException, doing: str) -> OsrdyneError:
    """Return the osrdyne error for an exception of the library. `doing`: the failed action, such as "declare queue
    x"."""
    text = mask_uri(str(error)) or type(error).__name__
    match error:
        case OsrdyneError():
            return error
        case AuthenticationError() | ProbableAuthenticationError():
            return BrokerAccessError(f"Could not {doing}: RabbitMQ refused the user or the password ({text})")
        case ChannelAccessRefused():
            return BrokerAccessError(f"Could not {doing}: RabbitMQ refused it: {text}")
        case ConnectionNotAllowed():
            return BrokerAccessError(f"Could not {doing}: RabbitMQ does not allow it: {text}")
        case ConnectionInternalError():
            return BrokerInternalError(f"Could not {doing}: RabbitMQ closed the connection: {text}")
        case ChannelNotFoundEntity():
            return BrokerNotFoundError(f"Could not {doing}: {text}")
        case ChannelPreconditionFailed() | ChannelLockedResource():
            return BrokerConflictError(f"Could not {doing}: {text}")
        case PublishError():
            return PublishRefusedError(f"Could not {doing}: there is no queue for it")
        case DeliveryError():
            return QueueFullError(f"Could not {doing}: RabbitMQ refused the message (the queue is full)")
        case TimeoutError():  # a subclass of OSError, so it comes first
            return BrokerSilentError(f"RabbitMQ did not answer in time while trying to {doing}.")
        case AMQPConnectionError() | OSError() if (reason := describe_tls_error(error)) is not None:
            return BrokerUnavailableError(f"TLS failed while trying to {doing}: {reason}.")
        case AMQPConnectionError() | OSError() if (reason := describe_unreachable(error)) is not None:
            return BrokerUnavailableError(f"Could not {doing}: {reason}.")
        case StopAsyncIteration():  # of aiormq, when the peer closes the socket before it sends anything
            return BrokerUnavailableError(f"RabbitMQ closed the connection while trying to {doing}.")
        case AMQPConnectionError() | ChannelInvalidStateError() | OSError() | RuntimeError():
            return BrokerUnavailableError(f"Could not {doing}: the connection to RabbitMQ failed: {text}")
        case ChannelClosed():
            return BrokerUnavailableError(f"The channel was closed while trying to {doing}: {text}")
        case _:
            return BrokerError(f"Could not {doing}: {text}")


def describe_end(reason: BaseException | None) -> str:
    """Describe what `wait_closed` has returned, without a full stop. Errors of lost sockets have no text."""
    if reason is None:
        return "this side closed it"
    return mask_uri(str(reason)).rstrip(". ") or describe_unreachable(reason) or "the connection was lost"


def describe_unreachable(error: BaseException) -> str | None:
    """Describe the network error that caused `error`; None if it is none of the known ones. For AMQP and HTTP API."""
    seen: list[BaseException] = []  # the causes of aiormq's errors may form a cycle
    found: BaseException | None = error
    while found is not None and found not in seen:
        descriptions = _ADDRESS_ERRORS if isinstance(found, socket.gaierror) else _NETWORK_ERRORS
        if isinstance(found, OSError) and found.errno in descriptions:
            return descriptions[found.errno]
        seen.append(found)
        found = found.__cause__ or found.__context__
    return None


def translated(doing: str) -> _Translation:
    """Raise osrdyne's errors for those of the library, in `with translated("declare queue x"):`. A cancellation of the
    current task passes through.

    aiormq also raises `CancelledError`, or a bare `Exception`, in callers that wait when a channel closes; without a
    cancellation of the task that means a lost channel. And aiormq swallows a cancellation that arrives together with an
    answer, as `asyncio.wait_for` does before Python 3.12: here it is raised again, so that the task ends.
    """
    return _Translation(doing)


class _Translation:
    """The context manager of `translated`. A generator would do, but takes twice as long, for every message."""

    __slots__ = ("_cancelled_before", "_doing", "_task")

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        try:
            self._task = asyncio.current_task()
        except RuntimeError:  # no event loop runs
            self._task = None
        self._cancelled_before = 0 if self._task is None else self._task.cancelling()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_cancelled = self._task is not None and self._task.cancelling() > self._cancelled_before
        translation: OsrdyneError | None = None
        if error is None and not is_cancelled:
            return  # nearly always
        if isinstance(error, _TRANSLATED):
            translation = translate_error(error, self._doing)
        elif isinstance(error, asyncio.CancelledError) or type(error) is Exception:
            if self._task is None or self._task.cancelling() > 0:
                raise asyncio.CancelledError from None
            translation = BrokerUnavailableError(f"The channel was closed while trying to {self._doing}.")
        elif error is not None and not isinstance(error, OsrdyneError):
            return  # a fault of the program
        if is_cancelled:
            raise asyncio.CancelledError from None
        if translation is not None:
            raise translation from error


_TRANSLATED = (AMQPError, ChannelInvalidStateError, OSError, TimeoutError, RuntimeError, StopAsyncIteration)
