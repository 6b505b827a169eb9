"""The one tree of errors.

Each class's docstring is its message template's first sentence; `retryable` says whether trying again later can
help. Foreign exceptions are translated into these at the boundary (`amqp/`, `broker/`, `drivers/`).
Nothing here may carry a secret: URIs are masked before they reach a field.
"""

from __future__ import annotations

from typing import Any, ClassVar


class OsrdyneError(Exception):
    """Something went wrong in osrdyne.

    `str(error)` is one sentence for a person; `fields` are the structured facts for a log line.
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
    """RabbitMQ did not answer in time, although the connection lives: a queue without its leader, perhaps."""


class BrokerInternalError(BrokerUnavailableError):
    """RabbitMQ ended the connection because of an error of its own (541), which it draws from what it was sent."""


class BrokerAccessError(BrokerError):
    """RabbitMQ refused the credentials or a permission is missing."""


class BrokerConflictError(BrokerError):
    """A queue, exchange or policy exists already with other arguments."""


class BrokerNotFoundError(BrokerError):
    """A queue or exchange does not exist."""


class StreamDataLostError(BrokerError):
    """Messages of a stream that were to be read are no longer in it."""


class LastValueStoreError(OsrdyneError):
    """The database of last values cannot be used; the message names the cause and the remedy."""

    retryable = True


class PublishRefusedError(BrokerError):
    """RabbitMQ refused a message: negative confirm, or no queue for it."""

    retryable = True


class QueueNotSweptError(OsrdyneError):
    """A queue could not be swept for expired requests; the requests taken out of it return to it."""


class QueueFullError(PublishRefusedError):
    """RabbitMQ refused a message because its queue has reached a limit."""


class AddressRefusedError(PublishRefusedError):
    """The reply address is invalid, or of a node that has left. RabbitMQ closes a connection that publishes to it."""

    retryable = False


class LeadershipLostError(BrokerError):
    """This controller no longer holds the leader token, so it may not act."""

    retryable = True


class CommandRefusedError(LeadershipLostError):
    """RabbitMQ refused a command on the channel of the leader token, and with it went the token."""


class InvalidMessageError(OsrdyneError):
    """A message on one of our queues cannot be understood."""


class MessageTooLargeError(InvalidMessageError):
    """The headers of a message do not fit into one frame; RabbitMQ would close the connection that sends it."""


class InvalidKeyError(InvalidMessageError):
    """A key is not UTF-8, or longer than 255 bytes."""


class DriverError(OsrdyneError):
    """A worker group driver failed."""

    retryable = True


class DriverUnavailableError(DriverError):
    """The backend of a driver (Docker engine, Kubernetes API server, systemd) does not answer."""


class StartFailedError(DriverError):
    """A worker could not be started; `log_lines` are its last words."""

    def __init__(self, message: str, *, log_lines: tuple[str, ...] = (), **fields: Any) -> None:
        super().__init__(message, **fields)
        self.log_lines = log_lines


class SlotTakenError(DriverError):
    """A worker with the same name (pool, key, slot) exists already."""


class PoolConflictError(OsrdyneError):
    """The state of the pool does not allow the request; the message names the cause and the remedy."""


class UnprotectedTransportError(OsrdyneError):
    """The policy of a key demands TLS, and the request came over plain HTTP from another host."""


class VersionConflictError(PoolConflictError):
    """A change expects another version to be active; `version` is the active one."""


class PoisonNotFoundError(OsrdyneError):
    """There is no such entry in the poison inventory."""


class NoSuchQueueError(OsrdyneError):
    """No queue was created for this key."""


class PortTakenError(OsrdyneError):
    """A port we were to listen on is in use by another process."""
