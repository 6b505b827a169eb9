"""The socket under a connection: frames that are written together leave together, and a refused log-in says why.

aiormq writes frame by frame, and each write is a system call that wakes the broker up. With many requests under way,
most of them come in the same pass of the event loop.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiormq.connection import TransportFactory
from aiormq.exceptions import AMQPConnectionError
from pamqp import commands as spec
from pamqp.exceptions import PAMQPException
from pamqp.frame import unmarshal
from yarl import URL


class CoalescingWriter(asyncio.StreamWriter):
    """Sends what was written in one pass of the event loop at its end, as one piece."""

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

    def write(self, data: Any) -> None:
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
        return reader, CoalescingWriter(transport, protocol, reader, loop)

    def new_reader(self) -> LoginReader:
        """Return a reader whose bytes `refusal` understands."""
        self._reader = LoginReader(loop=asyncio.get_running_loop())
        self._reader.login = bytearray()
        return self._reader

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
