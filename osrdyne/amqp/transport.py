"""The socket of a connection: combines frames into one write, sends none after the close of its channel, and keeps the
reason of a refused log-in.

aiormq writes frame by frame, and each write is a system call that wakes RabbitMQ up. With many requests in flight, most
frames are written in the same pass of the event loop.

A frame that reaches RabbitMQ on a channel that is not open closes the whole connection (broker: channel-ends), and a
leader loses its term. aiormq sends such frames. It marks a channel as closed some passes of the loop after it has sent
`channel.close-ok`; until then a cancelled RPC, an acknowledgement or a message still leaves on the channel. It closes a
channel a second time if the close is cancelled, or is not answered within a heartbeat. It leaves a `channel.close` of
RabbitMQ unanswered if its channel object is closed already; the next `channel.open` with that number then closes the
connection as well.

So this module handles the end of a channel, because it has the final order of the frames. It answers every
`channel.close` of RabbitMQ when it reads it, and after a close or its answer it sends nothing on that number until the
number is opened again.
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
_BEGINNING = struct.Struct(">BHII")  # the header, and the method of a method frame
_METHOD = 1
_METHOD_BYTES = slice(_HEADER.size, _HEADER.size + 4)
_FRAME_END = 0xCE
CHANNEL_OPEN = struct.pack(">HH", 20, 10)
CHANNEL_CLOSE = struct.pack(">HH", 20, 40)
CHANNEL_CLOSE_OK = struct.pack(">HH", 20, 41)
_CHANNEL_CLOSE = 20 << 16 | 40
_CONNECTION_CLOSE = 10 << 16 | 50
_CONNECTION_BLOCKED = 10 << 16 | 60
_CONNECTION_UNBLOCKED = 10 << 16 | 61
_WATCHED = frozenset({_CHANNEL_CLOSE, _CONNECTION_CLOSE, _CONNECTION_BLOCKED, _CONNECTION_UNBLOCKED})


class CoalescingWriter(asyncio.StreamWriter):
    """Sends the frames that are written in one pass of the event loop together, at the end of the pass.

    Drops frames on a channel after its close; a call that waits for an answer to one fails when aiormq notices the end
    of the channel.
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
        self._unsent: list[Any] = []
        self._closed: set[int] = set()  # channels whose last frame was a close, or the answer to one

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
        """Answer RabbitMQ's close, even after a close of this side: RabbitMQ waits for the answer in both cases."""
        self._closed.add(channel)
        self._append(_HEADER.pack(_METHOD, channel, 4) + CHANNEL_CLOSE_OK + bytes([_FRAME_END]))

    def _append(self, data: Any) -> None:
        if not self._unsent:
            self._soon(self.flush)
        self._unsent.append(data)

    def flush(self) -> None:
        """Send the collected frames, unless the connection is closing."""
        data, self._unsent = self._unsent, []
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


class FrameReader(asyncio.StreamReader):
    """Passes received bytes on to aiormq, and watches for the frames that say what becomes of channels and connection.

    Before aiormq reads it, `on_close` is called with the number of each channel that RabbitMQ closes, and `on_block`
    when RabbitMQ blocks the connection (True) or ends that (False).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.on_close: Callable[[int], None] = lambda _: None
        self.on_block: Callable[[bool], None] = lambda _: None
        self.login: bytearray | None = None  # a copy of the bytes received during the log-in
        self.is_lost = False  # RabbitMQ has closed the connection, or the socket has failed
        self.is_blocked = False  # RabbitMQ has blocked the connection, because of a memory or disk alarm
        self._begun = b""  # the beginning of a frame, too short to show its kind and method
        self._missing = 0  # bytes of the last frame that have not arrived

    def feed_data(self, data: Any) -> None:
        self._scan(data)
        if self.login is not None:
            self.login += data
        super().feed_data(data)

    def feed_eof(self) -> None:
        self.is_lost = True
        super().feed_eof()

    def set_exception(self, exc: Exception) -> None:
        self.is_lost = True
        super().set_exception(exc)

    def _scan(self, data: bytes) -> None:
        """Find the watched frames. All received bytes pass here: a frame costs one `unpack_from`."""
        if self._begun:
            data = self._begun + data
            self._begun = b""
        start, end = self._missing, len(data)
        last = end - _BEGINNING.size
        # A shorter frame, such as a heartbeat, waits in `_begun` if it is the last one. No watched frame is so short.
        while start <= last:
            kind, channel, size, method = _BEGINNING.unpack_from(data, start)
            if method in _WATCHED and kind == _METHOD:
                self._note(method, channel)
            start += _HEADER.size + size + 1
        if start < end:
            self._begun, self._missing = bytes(data[start:]), 0
        else:
            self._missing = start - end

    def _note(self, method: int, channel: int) -> None:
        if method == _CHANNEL_CLOSE:
            self.on_close(channel)
        elif method == _CONNECTION_CLOSE:
            self.is_lost = True
        elif self.is_blocked != (method == _CONNECTION_BLOCKED):
            self.is_blocked = not self.is_blocked
            self.on_block(self.is_blocked)


class CoalescingTransport(TransportFactory):
    """Opens the socket of one connection (`amqp` or `amqps`), with a `FrameReader` and a `CoalescingWriter`."""

    def __init__(self) -> None:
        self.on_block: Callable[[bool], None] = lambda _: None
        self._reader: FrameReader | None = None
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

    def new_reader(self) -> FrameReader:
        """Return the reader of the connection, whose log-in `refusal` parses."""
        self._reader = reader = FrameReader(asyncio.get_running_loop())
        reader.login = bytearray()
        reader.on_block = self.on_block
        return reader

    @property
    def is_lost(self) -> bool:
        """Whether RabbitMQ has closed the connection, or the socket has failed. aiormq notices it a moment later."""
        return self._reader is not None and self._reader.is_lost

    @property
    def is_blocked(self) -> bool:
        """Whether RabbitMQ has blocked the connection."""
        return self._reader is not None and self._reader.is_blocked

    def end_login(self) -> None:
        """Stop copying received bytes."""
        if self._reader is not None:
            self._reader.login = None

    def refusal(self) -> spec.Connection.Close | None:
        """Return RabbitMQ's `connection.close` during the log-in; None if it sent none.

        aiormq treats it as an unexpected frame and drops its code and text, so that a missing virtual host, a limit of
        connections, and a virtual host or RabbitMQ that is stopping could not be distinguished.
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
