"""The proxy of the fault suite."""

from __future__ import annotations

import asyncio

import pytest
from broker_api import PATIENCE

from tests.chaos.proxy import Proxy

pytestmark = pytest.mark.one_rabbitmq

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1000):
        writer.write(data)
    writer.close()


@pytest.fixture
async def proxy():
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with Proxy(server.sockets[0].getsockname()[1]) as running:
        yield running
    server.close()
    await server.wait_closed()


@pytest.fixture
async def streams(proxy):
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    yield reader, writer
    writer.close()


async def exchanged(streams: Streams, word: bytes) -> bytes:
    reader, writer = streams
    writer.write(word)
    async with asyncio.timeout(PATIENCE):
        return await reader.readexactly(len(word))


async def ends(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(PATIENCE):
        try:
            return await reader.read() == b""
        except ConnectionError:
            return True


async def test_held_bytes_pass_later_and_cut_connections_end(proxy, streams):
    assert await exchanged(streams, b"hello") == b"hello"
    proxy.hold()
    later = asyncio.create_task(exchanged(streams, b"later"))
    await asyncio.wait({later}, timeout=0.1)
    assert not later.done()
    proxy.resume()
    assert await later == b"later"
    proxy.hold()
    streams[1].write(b"swallowed")
    await asyncio.sleep(0.05)
    proxy.cut()
    proxy.resume()
    assert await ends(streams[0])
    proxy.refusing = True
    refused = await asyncio.open_connection("127.0.0.1", proxy.port)
    assert await ends(refused[0])
    refused[1].close()
    proxy.refusing = False
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    assert await exchanged((reader, writer), b"again") == b"again"
    writer.write_eof()
    assert await ends(reader)
    writer.close()
