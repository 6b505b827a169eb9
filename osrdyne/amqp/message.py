"""The two shapes of a message: `Message` to be published and `Delivery` received."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from aiormq.abc import DeliveredMessage
from pamqp import commands as spec

from osrdyne.protocol.messages import BROKER_HEADERS, ROUTING_HEADERS, Request, request_from_wire

if TYPE_CHECKING:
    from osrdyne.amqp.channel import Channel

PERSISTENT = 2
TRANSIENT = 1

_ROOM_FOR_ONE_HEADER = 16
"""Lengths, type, and a number if it is one."""
_BYTES_OF_A_CHARACTER = 4
DIRECT_REPLY_TO_QUEUE = "amq.rabbitmq.reply-to"


@dataclass(frozen=True, slots=True)
class Message:
    """A message to be published. `expiration` is in milliseconds, as text (AMQP)."""

    body: bytes = b""
    headers: Mapping[str, object] = field(default_factory=dict, repr=False)
    correlation_id: str | None = None
    reply_to: str | None = None
    content_type: str | None = None
    content_encoding: str | None = None
    expiration: str | None = None
    timestamp: datetime | None = None
    message_id: str | None = None
    message_type: str | None = None
    app_id: str | None = None
    priority: int | None = None
    persistent: bool = True
    user_id: str | None = None
    """RabbitMQ closes the channel that names another user than its own, so that a reader may believe it."""

    def headers_at_most(self) -> float:
        """A quick upper bound of the bytes that the headers take on the wire; infinite when it is not that simple."""
        size = 0
        for name, value in self.headers.items():
            size += _ROOM_FOR_ONE_HEADER + _BYTES_OF_A_CHARACTER * len(name)
            if isinstance(value, str):
                size += _BYTES_OF_A_CHARACTER * len(value)
            elif isinstance(value, bytes | bytearray):
                size += len(value)
            elif not isinstance(value, int | float | None):
                return math.inf
        return size

    def properties(self) -> spec.Basic.Properties:
        return spec.Basic.Properties(
            content_type=self.content_type,
            content_encoding=self.content_encoding,
            headers=dict(self.headers),  # type: ignore[arg-type]
            delivery_mode=PERSISTENT if self.persistent else TRANSIENT,
            priority=self.priority,
            correlation_id=self.correlation_id,
            reply_to=self.reply_to,
            expiration=self.expiration,
            message_id=self.message_id,
            timestamp=self.timestamp,
            message_type=self.message_type,
            app_id=self.app_id,
            user_id=self.user_id,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """A message received, with the means to settle it. Settling twice, or on a closed channel, is an error of ours."""

    channel: Channel = field(repr=False)
    tag: int
    exchange: str
    routing_key: str
    redelivered: bool
    body: bytes = field(repr=False)
    properties: spec.Basic.Properties = field(repr=False)

    @classmethod
    def from_aiormq(cls, channel: Channel, message: DeliveredMessage) -> Delivery:
        return cls(
            channel=channel,
            tag=message.delivery_tag or 0,
            exchange=message.exchange or "",
            routing_key=message.routing_key or "",
            redelivered=bool(message.redelivered),
            body=message.body,
            properties=message.header.properties,
        )

    @property
    def headers(self) -> Mapping[str, object]:
        return self.properties.headers or {}

    async def ack(self) -> None:
        await self.channel.ack(self.tag)

    async def nack(self, *, requeue: bool = True) -> None:
        """Give it back without blame (not counted as a failure on RabbitMQ 4.3)."""
        await self.channel.nack(self.tag, requeue=requeue)

    async def reject(self, *, requeue: bool = True) -> None:
        """Give it back as a failure: it counts towards the delivery limit on every version (broker:
        count-failures-by-reject)."""
        await self.channel.reject(self.tag, requeue=requeue)

    def to_request(self, *, now_ms: int, key: str | None = None) -> Request:
        """Interpret the delivery as a request; `key` replaces the routing key (in a dead letter they differ)."""
        properties = self.properties
        return request_from_wire(
            key=self.routing_key if key is None else key,
            body=self.body,
            headers=self.headers,
            correlation_id=properties.correlation_id,
            reply_to=properties.reply_to,
            content_type=properties.content_type,
            content_encoding=properties.content_encoding,
            expiration=properties.expiration,
            timestamp=properties.timestamp,
            redelivered=self.redelivered,
            now_ms=now_ms,
        )

    def to_message(self, *, headers: Mapping[str, object], expiration: str | None) -> Message:
        """A copy to be republished: `user-id` and the broker's own headers are left out (broker: strip-on-republish),
        and those that
        make it deliver to further queues, which would act with our permissions instead of the first publisher's."""
        properties = self.properties
        left_out = BROKER_HEADERS | ROUTING_HEADERS
        return Message(
            body=self.body,
            headers={name: value for name, value in headers.items() if name not in left_out},
            correlation_id=properties.correlation_id,
            # RabbitMQ makes an address of the bare name, or refuses the message: on ours it would be our own address.
            reply_to=None if properties.reply_to == DIRECT_REPLY_TO_QUEUE else properties.reply_to,
            content_type=properties.content_type,
            content_encoding=properties.content_encoding,
            expiration=expiration,
            timestamp=properties.timestamp,
            message_id=properties.message_id,
            message_type=properties.message_type,
            app_id=properties.app_id,
            priority=properties.priority,
        )
