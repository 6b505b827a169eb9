"""Which publish a returned message belongs to: `Channel` numbers its publishes, and a header names the number.

aiormq finds the publish of a returned message by the message id alone. It gives an id to each message that has none, so
that receivers would read an id that the client has not set. And of two messages in flight with the same id, the
returned one could count as confirmed and be lost. So aiormq takes the number for the message id, and RabbitMQ gets the
properties as they are. RabbitMQ returns a message with its headers, among them that of the number.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from pamqp import commands as spec
from pamqp.header import ContentHeader

from osrdyne.protocol.messages import PUBLISH_HEADER

Put = Callable[[Any], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class NumberedProperties:
    """What aiormq and pamqp read of the properties of a message that is published."""

    message_id: str
    """The number of the publish."""
    properties: spec.Basic.Properties

    def marshal(self) -> bytes:
        return self.properties.marshal()


def named_returns(put: Put) -> Put:
    """`put` of the queue of received frames of one channel: a returned message has the number of its publish as its
    message id. RabbitMQ sends the header of a message as the next frame of its channel."""
    is_return = False

    async def put_named(item: tuple[int, object]) -> None:
        nonlocal is_return
        _, frame = item
        if is_return and isinstance(frame, ContentHeader):
            number = (frame.properties.headers or {}).get(PUBLISH_HEADER)
            frame.properties.message_id = number if isinstance(number, str) else None
        is_return = isinstance(frame, spec.Basic.Return)
        await put(item)

    return put_named
