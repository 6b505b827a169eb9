"""Translation of aiormq's exceptions into the tree of `osrdyne.errors`. Match codes, not texts (broker:
one-channel-for-commands)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import aiormq
from aiormq.exceptions import ChannelInvalidStateError, ConnectionInternalError, DeliveryError, PublishError

from osrdyne.amqp.tls import describe_tls_fault
from osrdyne.amqp.unreachable import describe_unreachable
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


def translate_fault(error: BaseException, doing: str) -> OsrdyneError:
    """The error of ours for one of aiormq's, while `doing` something ("declare queue x")."""
    text = mask_uri(str(error)) or type(error).__name__
    match error:
        case OsrdyneError():
            return error
        case aiormq.AuthenticationError() | aiormq.ProbableAuthenticationError():
            return BrokerAccessError(f"Could not {doing}: RabbitMQ refused the user or the password ({text})")
        case aiormq.ChannelAccessRefused():
            return BrokerAccessError(f"Could not {doing}, RabbitMQ refused it: {text}")
        case aiormq.ConnectionNotAllowed():
            return BrokerAccessError(f"Could not {doing}, RabbitMQ does not allow it: {text}")
        case ConnectionInternalError():
            return BrokerInternalError(f"Could not {doing}, RabbitMQ ended the connection: {text}")
        case aiormq.ChannelNotFoundEntity():
            return BrokerNotFoundError(f"Could not {doing}: {text}")
        case aiormq.ChannelPreconditionFailed() | aiormq.ChannelLockedResource():
            return BrokerConflictError(f"Could not {doing}: {text}")
        case PublishError():
            return PublishRefusedError(f"Could not {doing}: there is no queue for it")
        case DeliveryError():
            return QueueFullError(f"Could not {doing}: RabbitMQ refused the message (the queue is full)")
        case TimeoutError():  # before OSError, which it is
            return BrokerSilentError(f"RabbitMQ did not answer in time while trying to {doing}.")
        case aiormq.AMQPConnectionError() | OSError() if (trouble := describe_tls_fault(error)) is not None:
            return BrokerUnavailableError(f"TLS failed while trying to {doing}: {trouble}.")
        case aiormq.AMQPConnectionError() | OSError() if (trouble := describe_unreachable(error)) is not None:
            return BrokerUnavailableError(f"Could not {doing}: {trouble}.")
        case StopAsyncIteration():  # aiormq's word for a peer that hung up before it said anything
            return BrokerUnavailableError(f"RabbitMQ closed the connection while trying to {doing}.")
        case aiormq.AMQPConnectionError() | ChannelInvalidStateError() | OSError() | RuntimeError():
            return BrokerUnavailableError(f"Could not {doing}, the connection to RabbitMQ failed: {text}")
        case aiormq.ChannelClosed():
            return BrokerUnavailableError(f"The channel was closed while trying to {doing}: {text}")
        case _:
            return BrokerError(f"Could not {doing}: {text}")


def _current_task() -> asyncio.Task[object] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs
        return None


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raise errors of ours for aiormq's. A task's own cancellation passes through.

    aiormq also cancels waiters when a channel closes under them, or throws a bare `Exception` into them; without a
    pending cancellation of the task that is a lost channel. And it swallows a cancellation that arrives together with
    an answer (its time-outs are `asyncio.wait_for`, which does so before Python 3.12): a task that went on then would
    never end, so the cancellation is raised here.
    """
    task = _current_task()
    cancelled_before = 0 if task is None else task.cancelling()
    fault: BaseException | None = None
    try:
        yield
    except OsrdyneError as error:
        fault = error
    except (
        aiormq.AMQPError,
        ChannelInvalidStateError,
        OSError,
        TimeoutError,
        RuntimeError,
        StopAsyncIteration,
    ) as error:
        fault = translate_fault(error, doing)
        fault.__cause__ = error
    except (asyncio.CancelledError, Exception) as error:
        if not isinstance(error, asyncio.CancelledError) and type(error) is not Exception:
            raise
        if task is None or task.cancelling() > 0:
            raise asyncio.CancelledError from None
        fault = BrokerUnavailableError(f"The channel was closed while trying to {doing}.")
    if task is not None and task.cancelling() > cancelled_before:
        raise asyncio.CancelledError
    if fault is not None:
        raise fault
