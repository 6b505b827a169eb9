"""The proxy of the fault suite."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.chaos.proxy import Proxy

pytestmark = pytest.mark.one_rabbitmq

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
PATIENCE = 120.0


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1000):
        writer.write(data)
    writer.close()


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with Proxy(server.sockets[0].getsockname()[1]) as running:
        yield running
    server.close()
    await server.wait_closed()


@pytest.fixture
async def streams(proxy: Proxy) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    yield reader, writer
    writer.close()


async def said(streams: Streams, word: bytes) -> bytes:
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


async def test_bytes_pass_both_ways(streams: Streams) -> None:
    assert await said(streams, b"hello") == b"hello"


async def test_end_of_one_side_reaches_the_other(streams: Streams) -> None:
    await said(streams, b"hello")
    streams[1].write_eof()
    assert await ends(streams[0])


async def test_held_bytes_pass_once_it_goes_on(proxy: Proxy, streams: Streams) -> None:
    proxy.hold()
    saying = asyncio.create_task(said(streams, b"later"))
    await asyncio.wait({saying}, timeout=0.1)
    assert not saying.done()
    proxy.resume()
    assert await saying == b"later"


async def test_cut_ends_connections_and_new_ones_work(proxy: Proxy, streams: Streams) -> None:
    await said(streams, b"hello")
    proxy.cut()
    assert await ends(streams[0])
    again = await asyncio.open_connection("127.0.0.1", proxy.port)
    assert await said(again, b"again") == b"again"
    again[1].close()


async def test_swallowed_bytes_are_gone(proxy: Proxy, streams: Streams) -> None:
    await said(streams, b"hello")
    proxy.hold()
    streams[1].write(b"swallowed")
    await asyncio.sleep(0.05)
    proxy.cut()
    proxy.resume()
    assert await ends(streams[0])


async def test_refused_connection_ends_at_once(proxy: Proxy) -> None:
    proxy.refusing = True
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    assert await ends(reader)
    writer.close()
