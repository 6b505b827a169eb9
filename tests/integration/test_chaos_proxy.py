"""The proxy of the fault suite."""

import asyncio

import pytest
from broker_api import PATIENCE

from tests.chaos.proxy import Proxy

pytestmark = pytest.mark.one_rabbitmq


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1000):
        writer.write(data)
    writer.close()


async def exchanged(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, word: bytes) -> bytes:
    writer.write(word)
    async with asyncio.timeout(PATIENCE):
        return await reader.readexactly(len(word))


async def ends(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(PATIENCE):
        try:
            return await reader.read() == b""
        except ConnectionError:
            return True


async def test_held_bytes_pass_later_and_cut_connections_end():
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, Proxy(server.sockets[0].getsockname()[1]) as proxy:
        streams = await asyncio.open_connection("127.0.0.1", proxy.port)
        assert await exchanged(*streams, b"hello") == b"hello"
        proxy.hold()
        later = asyncio.create_task(exchanged(*streams, b"later"))
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
        proxy.refusing = False
        again = await asyncio.open_connection("127.0.0.1", proxy.port)
        assert await exchanged(*again, b"again") == b"again"
        again[1].write_eof()
        assert await ends(again[0])
        for _, writer in (streams, refused, again):
            writer.close()
