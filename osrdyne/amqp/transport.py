"""The socket under a connection: frames written together leave together, and none follows the close of its channel.

It also keeps the reason of a refused log-in.

aiormq writes frame by frame, and each write is a system call that wakes the broker up. With many requests under way,
most of them come in the same pass of the event loop.

A frame that reaches RabbitMQ on a channel that is not open closes the whole connection (broker: channel-ends), and a
leader loses its term. aiormq sends such frames. It marks a channel as closed some passes of the loop after it has sent
`channel.close-ok`; until then an RPC that is cancelled or times out, an acknowledgement or a message still leaves on
the channel. It closes a channel a second time when its close is cancelled, or not answered within a heartbeat. It
leaves a `channel.close` of the broker unanswered when its write queue is full, or when its channel object is closed
already; the next `channel.open` with that number closes the connection as well.

So the end of a channel is decided here, where the order of the frames is final: every `channel.close` of the broker is
answered when it is read, and after a close or its answer nothing leaves on that number until it is opened again.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any

from aiormq.connection import TransportFactory
from aiormq.exceptions import AMQPConnectionError
from pamqp import commands as spec
from pamqp.exceptions import PAMQPException
from pamqp.frame import unmarshal
from yarl import URL

_HEADER = struct.Struct(">BHI")  # type, channel, size
_METHOD = 1
_METHOD_BYTES = slice(_HEADER.size, _HEADER.size + 4)
_FRAME_END = 0xCE
CHANNEL_OPEN = struct.pack(">HH", 20, 10)
CHANNEL_CLOSE = struct.pack(">HH", 20, 40)
CHANNEL_CLOSE_OK = struct.pack(">HH", 20, 41)


class CoalescingWriter(asyncio.StreamWriter):
    """Sends what was written in one pass of the event loop at its end, as one piece.

    Frames on a channel after its close are dropped. RabbitMQ would ignore it at best; a call that waits for an
    answer to it fails with the channel.
    """

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        protocol: asyncio.StreamReaderProtocol,
        reader: asyncio.StreamReader,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(transport, protocol, reader, loop)
        self._soon = loop.call_soon
        self._waiting: list[Any] = []
        self._closed: set[int] = set()  # channels on which a close, or the answer to one, was the last frame

    def write(self, data: Any) -> None:
        """Write the frames of one channel."""
        channel = data[1] << 8 | data[2]
        method = data[_METHOD_BYTES] if data[0] == _METHOD else b""
        if method == CHANNEL_OPEN:
            self._closed.discard(channel)
        elif channel in self._closed:
            return
        elif method in {CHANNEL_CLOSE, CHANNEL_CLOSE_OK}:
            self._closed.add(channel)
        self._append(data)

    def answer_close(self, channel: int) -> None:
        """Confirm the broker's close, also after our own: the broker waits for it either way."""
        self._closed.add(channel)
        self._append(_HEADER.pack(_METHOD, channel, 4) + CHANNEL_CLOSE_OK + bytes([_FRAME_END]))

    def _append(self, data: Any) -> None:
        if not self._waiting:
            self._soon(self.flush)
        self._waiting.append(data)

    def flush(self) -> None:
        """Send what waits; nothing when the connection is closing anyway."""
        data, self._waiting = self._waiting, []
        if data and not self.is_closing():
            self.transport.writelines(data)

    async def drain(self) -> None:
        self.flush()
        await super().drain()

    def write_eof(self) -> None:
        self.flush()
        super().write_eof()

    def close(self) -> None:
        self.flush()
        super().close()


class LoginReader(asyncio.StreamReader):
    """Keeps a copy of what the broker sends until the log-in is over."""

    login: bytearray | None = None

    def feed_data(self, data: Any) -> None:
        if self.login is not None:
            self.login += data
        super().feed_data(data)


class ClosesReader(LoginReader):
    """Passes on what arrives, and calls `on_close` with the channel of each `channel.close` first."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.on_close: Callable[[int], None] = lambda _: None
        self._started = b""  # the beginning of a frame, too short to show what it is
        self._left = 0  # bytes of the last frame that are still to come

    def feed_data(self, data: Any) -> None:
        self._scan(data)
        super().feed_data(data)

    def _scan(self, data: bytes) -> None:
        if self._started:
            data = self._started + data
            self._started = b""
        start, end = self._left, len(data)
        while start + _HEADER.size <= end:
            kind, channel, size = _HEADER.unpack_from(data, start)
            if kind == _METHOD:
                if start + _METHOD_BYTES.stop > end:
                    break
                if data[start + _METHOD_BYTES.start : start + _METHOD_BYTES.stop] == CHANNEL_CLOSE:
                    self.on_close(channel)
            start += _HEADER.size + size + 1
        self._left = max(0, start - end)
        self._started = bytes(data[start:])


class CoalescingTransport(TransportFactory):
    """Opens the socket of one connection as aiormq would (`amqp` and `amqps`), with a `CoalescingWriter`."""

    def __init__(self) -> None:
        self._reader: LoginReader | None = None
        self._socket: asyncio.WriteTransport | None = None

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        tls = kwargs.pop("ssl_context_provider")
        context = await tls.get_context() if url.scheme == "amqps" else None
        loop = asyncio.get_running_loop()
        reader = self.new_reader()
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        assert url.host is not None
        assert url.port is not None
        try:
            transport, _ = await loop.create_connection(lambda: protocol, url.host, url.port, ssl=context, **kwargs)
        except OSError as error:
            raise AMQPConnectionError(*error.args) from error
        self._socket = transport
        writer = CoalescingWriter(transport, protocol, reader, loop)
        reader.on_close = writer.answer_close
        return reader, writer

    def new_reader(self) -> ClosesReader:
        """Return a reader whose bytes `refusal` understands."""
        self._reader = reader = ClosesReader(asyncio.get_running_loop())
        reader.login = bytearray()
        return reader

    def end_login(self) -> None:
        """Stop keeping what the broker sends."""
        if self._reader is not None:
            self._reader.login = None

    def refusal(self) -> spec.Connection.Close | None:
        """Return the broker's `connection.close` of the log-in; None if it sent none.

        aiormq takes it for an unexpected frame and drops its code and text, so "no such virtual host", "too many
        connections", "the virtual host is down" and "RabbitMQ stops" would all be the same.
        """
        received = bytes((self._reader and self._reader.login) or b"")
        while received:
            try:
                consumed, _, frame = unmarshal(received)
            except PAMQPException:
                return None
            if isinstance(frame, spec.Connection.Close):
                return frame
            received = received[consumed:]
        return None

    def abort(self) -> None:
        """Close the socket at once."""
        if self._socket is not None:
            self._socket.abort()
