"""A publisher that writes AMQP frames by itself: it sends what no client library would.

It speaks just enough of the protocol to publish with confirms, one message after the other.
"""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

from pamqp import base, commands, frame

from osrdyne.testing.hostile import HostileMessage
from tests.integration.broker_api import PATIENCE

METHOD, HEADER, BODY = 1, 2, 3
FRAME_END = b"\xce"
FRAME_MAX = 131_072
BASIC, PUBLISH = 60, 40


class RawPublisher:
    """What the broker closes, for a message that it does not take, is opened again."""

    def __init__(self, uri: str) -> None:
        self._uri = urlsplit(uri)
        self.user = unquote(self._uri.username or "guest").encode()
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def open(self) -> None:
        uri = self._uri
        self._reader, self._writer = await asyncio.open_connection(uri.hostname, uri.port or 5672)
        self._writer.write(b"AMQP\x00\x00\x09\x01")
        await self._read()
        log_in = f"\0{self.user.decode()}\0{unquote(uri.password or 'guest')}"
        self._send(commands.Connection.StartOk(client_properties={}, response=log_in), channel=0)
        await self._read()
        self._send(commands.Connection.TuneOk(1, FRAME_MAX, 0), channel=0)
        await self._ask(commands.Connection.Open(unquote(uri.path[1:]) or "/"), channel=0)
        await self._open_channel()

    async def _open_channel(self) -> None:
        await self._ask(commands.Channel.Open())
        await self._ask(commands.Confirm.Select())

    async def close(self) -> None:
        self._writer.close()

    async def publish(self, message: HostileMessage, *, exchange: str, routing_key: bytes | None = None) -> bool:
        """Whether the broker has taken it."""
        key = message.routing_key if routing_key is None else routing_key
        name = exchange.encode()
        method = struct.pack(">HHH", BASIC, PUBLISH, 0) + bytes([len(name)]) + name + bytes([len(key)]) + key + b"\0"
        self._write(METHOD, method)
        self._write(HEADER, struct.pack(">HHQ", BASIC, 0, len(message.body)) + message.properties)
        step = FRAME_MAX - 8
        for start in range(0, len(message.body), step):
            self._write(BODY, message.body[start : start + step])
        try:
            await self._writer.drain()
            answer = await self._read()
        except (ConnectionError, asyncio.IncompleteReadError):
            answer = commands.Connection.Close()
        match answer:
            case commands.Channel.Close():
                self._send(commands.Channel.CloseOk())
                await self._open_channel()
            case commands.Connection.Close():
                await self.close()
                await self.open()
        return isinstance(answer, commands.Basic.Ack)

    def _write(self, kind: int, payload: bytes, *, channel: int = 1) -> None:
        self._writer.write(struct.pack(">BHI", kind, channel, len(payload)) + payload + FRAME_END)

    def _send(self, method: base.Frame, *, channel: int = 1) -> None:
        self._writer.write(frame.marshal(method, channel))

    async def _ask(self, method: base.Frame, *, channel: int = 1) -> Any:
        self._send(method, channel=channel)
        return await self._read()

    async def _read(self) -> Any:
        async with asyncio.timeout(PATIENCE):
            head = await self._reader.readexactly(7)
            size = struct.unpack(">BHI", head)[2]
            return frame.unmarshal(head + await self._reader.readexactly(size + 1))[2]


@asynccontextmanager
async def raw_publisher(uri: str) -> AsyncIterator[RawPublisher]:
    publisher = RawPublisher(uri)
    await publisher.open()
    try:
        yield publisher
    finally:
        await publisher.close()
