"""The error boundary of a message: an unexpected error fails one message, not the leader's term.

Without it, a message on which a processor fails would end the leader's term, return to its queue, and end each term
that follows. Used by every processor. Errors of the broker pass: they concern the leader's term.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from osrdyne.amqp import Delivery
from osrdyne.errors import BrokerError
from osrdyne.logs import Logger


class ErrorBoundary:
    """Logs an unexpected error inside the `with` block and ends the block; then `failed` is true."""

    def __init__(self, delivery: Delivery, log: Logger) -> None:
        self._delivery = delivery
        self._log = log
        self.failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, BrokerError):
            return False
        self.failed = True
        self._log.error("message not processed", key=self._delivery.routing_key, exc_info=error)
        return True


async def to_dead_letters(delivery: Delivery) -> None:
    """Reject the message: RabbitMQ passes it to the dead letter responder, which answers it or keeps it as poison."""
    await delivery.reject(requeue=False)
