"""The socket under a connection: frames that are written together leave together.

aiormq writes frame by frame, and each write is a system call that wakes the broker up. With many requests under way,
most of them come in the same pass of the event loop.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiormq.connection import TransportFactory
from aiormq.exceptions import AMQPConnectionError
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


class CoalescingTransport(TransportFactory):
    """Opens the socket as aiormq would (`amqp` and `amqps`), with a `CoalescingWriter`."""

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        tls = kwargs.pop("ssl_context_provider")
        context = await tls.get_context() if url.scheme == "amqps" else None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        assert url.host is not None
        assert url.port is not None
        try:
            transport, _ = await loop.create_connection(lambda: protocol, url.host, url.port, ssl=context, **kwargs)
        except OSError as error:
            raise AMQPConnectionError(*error.args) from error
        return reader, CoalescingWriter(transport, protocol, reader, loop)
