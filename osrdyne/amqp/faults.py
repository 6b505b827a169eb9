"""Translation of aiormq's exceptions into the tree of `osrdyne.errors`. Match codes, not texts (BROKER 0.15)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import aiormq
from aiormq.exceptions import ChannelInvalidStateError, DeliveryError, PublishError

from osrdyne.amqp.tls import describe_tls_fault
from osrdyne.errors import (
    BrokerAccessError,
    BrokerConflictError,
    BrokerError,
    BrokerNotFoundError,
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
        case aiormq.AuthenticationError() | aiormq.ProbableAuthenticationError() | aiormq.ChannelAccessRefused():
            return BrokerAccessError(f"RabbitMQ refused to {doing}: {text}")
        case aiormq.ConnectionNotAllowed():
            return BrokerAccessError(f"RabbitMQ does not allow to {doing}: {text}")
        case aiormq.ChannelNotFoundEntity():
            return BrokerNotFoundError(f"Could not {doing}: {text}")
        case aiormq.ChannelPreconditionFailed() | aiormq.ChannelLockedResource():
            return BrokerConflictError(f"Could not {doing}: {text}")
        case PublishError():
            return PublishRefusedError(f"Could not {doing}: there is no queue for it")
        case DeliveryError():
            return QueueFullError(f"Could not {doing}: RabbitMQ refused the message (the queue is full)")
        case TimeoutError():  # before OSError, which it is
            return BrokerUnavailableError(f"RabbitMQ did not answer in time while trying to {doing}.")
        case aiormq.AMQPConnectionError() | OSError() if (trouble := describe_tls_fault(error)) is not None:
            return BrokerUnavailableError(f"TLS failed while trying to {doing}: {trouble}.")
        case aiormq.AMQPConnectionError() | ChannelInvalidStateError() | OSError() | RuntimeError():
            return BrokerUnavailableError(f"The connection to RabbitMQ failed while trying to {doing}: {text}")
        case aiormq.ChannelClosed():
            return BrokerUnavailableError(f"The channel was closed while trying to {doing}: {text}")
        case _:
            return BrokerError(f"Could not {doing}: {text}")


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raise errors of ours for aiormq's. A task's own cancellation passes through.

    aiormq also cancels waiters when a channel closes under them, or throws a bare `Exception` into them; without a
    pending cancellation of the task that is a lost channel.
    """
    try:
        yield
    except OsrdyneError:
        raise
    except (aiormq.AMQPError, ChannelInvalidStateError, OSError, TimeoutError, RuntimeError) as error:
        raise translate_fault(error, doing) from error
    except (asyncio.CancelledError, Exception) as error:
        task = asyncio.current_task()
        own_cancellation = task is None or task.cancelling() > 0
        if isinstance(error, asyncio.CancelledError) and own_cancellation:
            raise
        if not isinstance(error, asyncio.CancelledError) and type(error) is not Exception:
            raise
        if own_cancellation:
            raise asyncio.CancelledError from None
        raise BrokerUnavailableError(f"The channel was closed while trying to {doing}.") from None
