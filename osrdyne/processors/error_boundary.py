"""The edge of a processor: what nobody foresaw about one message is the end of that message, and not of the term.

A message whose processing raises would end the term, come back, and end each term that follows. Used by every
processor; errors of the broker pass, because they are the term's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from osrdyne.amqp import Delivery
from osrdyne.errors import BrokerError
from osrdyne.logs import Logger

Process = Callable[[Delivery], Awaitable[None]]


async def contained(process: Process, delivery: Delivery, *, otherwise: Process, log: Logger) -> None:
    """Process a delivery; when that fails for a reason of its own, log it once and do `otherwise`."""
    try:
        await process(delivery)
    except BrokerError:
        raise
    except Exception:
        log.exception("message that cannot be processed", key=delivery.routing_key)
        await otherwise(delivery)


async def to_dead_letters(delivery: Delivery) -> None:
    """Let RabbitMQ hand it to the dead letter responder, which answers it, or keeps what has nobody to answer."""
    await delivery.reject(requeue=False)
