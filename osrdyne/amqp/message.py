"""A message to be published (`Message`), and one that was received (`Delivery`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from aiormq.abc import DeliveredMessage
from pamqp import commands as spec

from osrdyne.protocol.activity import fingerprint
from osrdyne.protocol.messages import (
    BROKER_HEADERS,
    PATH_HEADER,
    PUBLISH_HEADER,
    ROUTING_HEADERS,
    Request,
    request_from_wire,
)
from osrdyne.protocol.names import DIRECT_REPLY_TO
from osrdyne.protocol.statuses import decode_text

if TYPE_CHECKING:
    from osrdyne.amqp.channel import Channel

PERSISTENT = 2
TRANSIENT = 1

_HEADER_OVERHEAD_BYTES = 16  # Lengths, type, and the value of a number.
_MAX_CHARACTER_BYTES = 4


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
    """Readers can trust it: RabbitMQ closes a channel that publishes another user than that of its connection."""

    def max_header_bytes(self) -> float:
        """Return a quick upper bound of the headers' bytes on the wire; infinity for nested values."""
        size = 0
        for name, value in self.headers.items():
            size += _HEADER_OVERHEAD_BYTES + _MAX_CHARACTER_BYTES * len(name)
            if isinstance(value, str):
                size += _MAX_CHARACTER_BYTES * len(value)
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
    """A message exactly as RabbitMQ delivered it, but without the number of its publish; with methods to acknowledge
    and return it.

    aio-pika's `IncomingMessage` is not used: it drops empty texts, changes expirations and replaces a missing priority
    (decision 0042).
    """

    channel: Channel = field(repr=False)
    tag: int
    exchange: str
    routing_key: str
    redelivered: bool
    body: bytes = field(repr=False)
    properties: spec.Basic.Properties = field(repr=False)

    @classmethod
    def from_aiormq(cls, channel: Channel, message: DeliveredMessage) -> Delivery:
        if (headers := message.header.properties.headers) is not None:
            headers.pop(PUBLISH_HEADER, None)
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

    def fingerprint(self) -> str:
        """The name of this request in the reports of workers and in the evidence of the controller."""
        properties = self.properties
        return fingerprint(
            key=self.routing_key,
            path=decode_text(self.headers.get(PATH_HEADER)) or "",
            correlation_id=properties.correlation_id,
            reply_to=properties.reply_to or None,
            message_id=properties.message_id,
            body=self.body,
        )

    async def ack(self) -> None:
        await self.channel.ack(self.tag)

    async def nack(self, *, requeue: bool = True) -> None:
        """Return it to the queue; RabbitMQ 4.3 does not count that as a failed delivery."""
        await self.channel.nack(self.tag, requeue=requeue)

    async def reject(self, *, requeue: bool = True) -> None:
        """Return it to the queue as a failed delivery, on every version (broker: count-failures-by-reject); without
        `requeue` it becomes a dead letter."""
        await self.channel.reject(self.tag, requeue=requeue)

    def to_request(self, *, now_ms: int, key: str | None = None, skew_ms: int = 0) -> Request:
        """Parse the delivery as a request. `key` replaces the routing key, which differs from it in a dead letter.
        `skew_ms`: by how much the clock that has set its deadline may be behind this one."""
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
            skew_ms=skew_ms,
        )

    def to_message(self, *, headers: Mapping[str, object], expiration: str | None) -> Message:
        """Copy it for republishing, without `user-id` and RabbitMQ's own headers (broker: strip-on-republish), and
        without headers that route to further queues, which would use the permissions of this connection."""
        properties = self.properties
        left_out = BROKER_HEADERS | ROUTING_HEADERS
        return Message(
            body=self.body,
            headers={name: value for name, value in headers.items() if name not in left_out},
            correlation_id=properties.correlation_id,
            # RabbitMQ would refuse the bare name, or replace it by the address of this connection.
            reply_to=None if properties.reply_to == DIRECT_REPLY_TO else properties.reply_to,
            content_type=properties.content_type,
            content_encoding=properties.content_encoding,
            expiration=expiration,
            timestamp=properties.timestamp,
            message_id=properties.message_id,
            message_type=properties.message_type,
            app_id=properties.app_id,
            priority=properties.priority,
        )
