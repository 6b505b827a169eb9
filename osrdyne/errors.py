"""The errors of osrdyne.

`amqp/`, `broker/` and `drivers/` translate the exceptions of libraries into these classes. `retryable`: whether a later
attempt may succeed. Neither messages nor fields may contain a secret: URIs are masked before.
"""

from __future__ import annotations

from typing import Any, ClassVar


class OsrdyneError(Exception):
    """The base of all errors of osrdyne.

    `str(error)` is a sentence for people; `fields` are structured values for a log line.
    """

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields


class ConfigurationError(OsrdyneError):
    """The configuration cannot be used; the message names the setting and the remedy."""


class BrokerError(OsrdyneError):
    """RabbitMQ refused or failed an operation."""


class BrokerUnavailableError(BrokerError):
    """RabbitMQ cannot be reached, or the connection was lost."""

    retryable = True


class BrokerSilentError(BrokerUnavailableError):
    """RabbitMQ did not answer in time over an open connection, for example because a queue has no Raft leader."""


class BrokerInternalError(BrokerUnavailableError):
    """RabbitMQ closed the connection with an internal error (541), usually caused by a frame that it received."""


class ManagementUnavailableError(BrokerUnavailableError):
    """RabbitMQ's HTTP API cannot be reached, fails, or did not answer in time. It says nothing about AMQP."""


class BrokerAccessError(BrokerError):
    """RabbitMQ refused the credentials, or a permission is missing."""


class BrokerConflictError(BrokerError):
    """A queue, exchange or policy exists already with other arguments."""


class BrokerNotFoundError(BrokerError):
    """A queue or exchange does not exist."""


class StreamDataLostError(BrokerError):
    """Requested messages of a stream are no longer in it."""


class LastValueStoreError(OsrdyneError):
    """The database of last values cannot be used; the message names the cause and the remedy."""

    retryable = True


class PublishRefusedError(BrokerError):
    """RabbitMQ refused a message: with a negative confirm, or because no queue was bound for it."""

    retryable = True


class QueueNotSweptError(OsrdyneError):
    """A sweep of a queue for expired requests failed; the requests taken out of the queue return to it."""


class QueueFullError(PublishRefusedError):
    """RabbitMQ refused a message because its queue has reached a limit."""


class AddressRefusedError(PublishRefusedError):
    """The reply address is invalid, or of a node that has left the cluster. RabbitMQ closes connections that publish to
    it."""

    retryable = False


class LeadershipLostError(BrokerError):
    """This controller does not hold the leader token any more, so it may not act."""

    retryable = True


class CommandRefusedError(LeadershipLostError):
    """RabbitMQ refused a command on the channel of the leader token, which closed the channel and ended the term."""


class InvalidMessageError(OsrdyneError):
    """A message in a queue of the pool is malformed."""


class MessageTooLargeError(InvalidMessageError):
    """The headers of a message do not fit into one frame; RabbitMQ would close a connection that sends it."""


class InvalidKeyError(InvalidMessageError):
    """A key is not UTF-8, or longer than 255 bytes."""


class DriverError(OsrdyneError):
    """A worker group driver failed."""

    retryable = True


class DriverUnavailableError(DriverError):
    """The backend of a driver (Docker engine, Kubernetes API server, systemd) does not answer."""


class StartFailedError(DriverError):
    """A worker could not be started; `log_lines` are the end of its log."""

    def __init__(self, message: str, *, log_lines: tuple[str, ...] = (), **fields: Any) -> None:
        super().__init__(message, **fields)
        self.log_lines = log_lines


class SlotTakenError(DriverError):
    """A worker with the same name (pool, key, slot) exists already."""


class PoolConflictError(OsrdyneError):
    """The state of the pool does not allow the request; the message names the cause and the remedy."""


class UnprotectedTransportError(OsrdyneError):
    """The policy of a key requires TLS, but the request came over plain HTTP from another host."""


class VersionConflictError(PoolConflictError):
    """A change expects another version to be active; `version` is the active one."""


class PoisonNotFoundError(OsrdyneError):
    """The poison inventory has no such entry."""


class NoSuchQueueError(OsrdyneError):
    """No queue was created for this key."""


class PortTakenError(OsrdyneError):
    """The port to listen on is in use by another process."""
