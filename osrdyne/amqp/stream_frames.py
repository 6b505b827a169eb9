"""Decodes the messages of streams from the bytes that RabbitMQ sends, many at once. Pure: no socket, no clock.

aiormq starts a task for each delivery, which limits a reader of streams to a few thousand messages a second (decision
0098). So this module decodes the three kinds of frames of deliveries and passes every other frame on to aiormq, which
handles the rest of the connection: log-in, TLS, heartbeats, channels, commands and errors.

Only for connections that only consume streams: messages that RabbitMQ returns to a publisher have the same frames.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from osrdyne.amqp.pamqp_patches import decode_timestamp, decode_value
from osrdyne.protocol.messages import PUBLISH_HEADER

OFFSET_HEADER = "x-stream-offset"
HEARTBEAT = b"\x08\x00\x00\x00\x00\x00\x00\xce"
_FRAME = struct.Struct(">BHI")  # type, channel, size
_FRAME_END = 0xCE
_METHOD, _HEADER, _BODY = 1, 2, 3
_DELIVER = struct.pack(">HH", 60, 60)
_LONG = struct.Struct(">Q")
_SIGNED = struct.Struct(">q")
_SIZE = struct.Struct(">I")
_FLAGS = struct.Struct(">H")
_SIZE_AND_FLAGS = struct.Struct(">QH")
_CONTENT_TYPE, _ENCODING, _HEADERS, _DELIVERY_MODE, _PRIORITY = 0x8000, 0x4000, 0x2000, 0x1000, 0x0800
_CORRELATION_ID, _REPLY_TO, _EXPIRATION, _MESSAGE_ID, _TIMESTAMP = 0x0400, 0x0200, 0x0100, 0x0080, 0x0040


class FrameError(ValueError):
    """The bytes are not frames of AMQP 0.9.1, so the connection cannot be read any further."""


@dataclass(slots=True)
class StreamMessage:
    """One message of a stream. `headers` have neither `x-stream-offset` nor the number of the publish; texts that are
    not UTF-8 hold surrogates.

    `offset` is -1 if RabbitMQ sent none: then the queue is not a stream.
    """

    offset: int
    exchange: str
    routing_key: str
    body: bytes = field(repr=False)
    headers: Mapping[str, object] = field(default_factory=dict, repr=False)
    content_type: str | None = None
    content_encoding: str | None = None
    correlation_id: str | None = None
    message_id: str | None = None
    timestamp: datetime | None = None
    delivery_tag: int = 0


@dataclass(slots=True)
class _Content:
    """A delivery whose header or body is still to come."""

    delivery_tag: int
    exchange: str
    routing_key: str
    properties: bytes = b""
    missing: int = -1  # bytes of the body; -1 before the header
    parts: list[bytes] = field(default_factory=list)


class StreamFrames:
    """Splits the bytes of one connection into messages, by channel, and frames for aiormq."""

    def __init__(self) -> None:
        self.messages: dict[int, list[StreamMessage]] = {}
        """The messages that have arrived, by channel number; `take` removes them."""
        self._rest = b""
        self._open: dict[int, _Content] = {}

    def feed(self, data: bytes) -> bytes:
        """Decode received bytes; return the complete frames that are not messages. Raises `FrameError`.

        A heartbeat replaces decoded messages: aiormq must see that the connection is alive, and RabbitMQ sends no
        heartbeats while it sends messages.
        """
        data = self._rest + data if self._rest else data
        position, end, passed, taken = 0, len(data), [], False
        while position + 8 <= end:
            kind, channel, size = _FRAME.unpack_from(data, position)
            start, stop = position + 7, position + 7 + size
            if stop >= end:
                break
            if data[stop] != _FRAME_END:
                if data[position : position + 4] == b"AMQP":  # the answer to another protocol version
                    break
                raise FrameError("RabbitMQ sent a frame without an end marker.")
            if kind == _BODY and channel in self._open:
                self._body(channel, data[start:stop])
            elif kind == _HEADER and channel in self._open:
                self._header(channel, data[start:stop])
            elif kind == _METHOD and data[start : start + 4] == _DELIVER:
                self._open[channel] = _delivery(data, start + 4)
                taken = True
            else:
                passed.append(data[position : stop + 1])
            position = stop + 1
        self._rest = data[position:] if position else data
        if self._rest[:4] == b"AMQP":
            passed.append(self._rest)
            self._rest = b""
        if taken:
            passed.append(HEARTBEAT)
        return b"".join(passed)

    def take(self, channel: int) -> list[StreamMessage]:
        """Return and remove the messages of a channel that have arrived."""
        return self.messages.pop(channel, [])

    def forget(self, channel: int) -> None:
        """Drop the messages of a closed channel."""
        self.messages.pop(channel, None)
        self._open.pop(channel, None)

    def _header(self, channel: int, payload: bytes) -> None:
        content = self._open[channel]
        content.missing, _ = _SIZE_AND_FLAGS.unpack_from(payload, 4)
        content.properties = payload[12:]
        if content.missing == 0:
            self._finish(channel, content)

    def _body(self, channel: int, payload: bytes) -> None:
        content = self._open[channel]
        content.parts.append(payload)
        content.missing -= len(payload)
        if content.missing <= 0:
            self._finish(channel, content)

    def _finish(self, channel: int, content: _Content) -> None:
        del self._open[channel]
        parts = content.parts
        message = _message(content, parts[0] if len(parts) == 1 else b"".join(parts))
        self.messages.setdefault(channel, []).append(message)


def _delivery(data: bytes, position: int) -> _Content:
    position += 1 + data[position]  # the consumer tag
    (tag,) = _LONG.unpack_from(data, position)
    exchange, position = _short(data, position + 9)  # the tag, and whether it was redelivered
    routing_key, _ = _short(data, position)
    return _Content(tag, exchange, routing_key)


def _message(content: _Content, body: bytes) -> StreamMessage:
    """Decode the properties, in the order of their flags."""
    data = content.properties
    (flags,) = _FLAGS.unpack_from(data)
    position = 2
    message = StreamMessage(-1, content.exchange, content.routing_key, body, delivery_tag=content.delivery_tag)
    if flags & _CONTENT_TYPE:
        message.content_type, position = _short(data, position)
    if flags & _ENCODING:
        message.content_encoding, position = _short(data, position)
    if flags & _HEADERS:
        (size,) = _SIZE.unpack_from(data, position)
        headers = _table(data, position + 4, position + 4 + size)
        offset = headers.pop(OFFSET_HEADER, -1)
        headers.pop(PUBLISH_HEADER, None)
        message.offset = offset if isinstance(offset, int) else -1
        message.headers = headers
        position += 4 + size
    position += bool(flags & _DELIVERY_MODE) + bool(flags & _PRIORITY)
    if flags & _CORRELATION_ID:
        message.correlation_id, position = _short(data, position)
    for flag in (_REPLY_TO, _EXPIRATION):
        if flags & flag:
            position += 1 + data[position]
    if flags & _MESSAGE_ID:
        message.message_id, position = _short(data, position)
    if flags & _TIMESTAMP:
        _, message.timestamp = decode_timestamp(data[position : position + 8])
    return message


def _table(data: bytes, position: int, end: int) -> dict[str, object]:
    table: dict[str, object] = {}
    while position < end:
        name, position = _short(data, position)
        kind = data[position]
        if kind == 0x6C:  # l, a signed integer of 64 bits: the offset
            (table[name],) = _SIGNED.unpack_from(data, position + 1)
            position += 9
        elif kind == 0x53:  # S, a string
            (size,) = _SIZE.unpack_from(data, position + 1)
            position += 5
            value = data[position : position + size]
            position += size
            try:
                table[name] = value.decode()
            except UnicodeDecodeError:
                table[name] = value
        else:
            table[name], position = decode_value(data, position, end)
    return table


def _short(data: bytes, position: int) -> tuple[str, int]:
    end = position + 1 + data[position]
    return data[position + 1 : end].decode("utf-8", "surrogateescape"), end
