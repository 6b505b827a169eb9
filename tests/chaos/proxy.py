"""A proxy of a TCP port or a Unix socket that cuts, holds up and delays what passes through it, on command."""

import asyncio
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 65_536


class Proxy:
    """`async with Proxy(backend) as proxy:` listens on `proxy.port` of the loopback and connects to the backend, which
    is a port there or the path of a Unix socket."""

    def __init__(self, backend: int | str) -> None:
        self.port = 0
        self.delay = 0.0
        """Seconds by which each piece is late."""
        self.refusing = False
        self._backend = backend
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[object]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.resume()
        while self._serving:
            self.cut()
            await asyncio.wait(self._serving, timeout=1)
        await asyncio.sleep(0)  # what was closed last is gone after one more round of the loop

    def cut(self) -> None:
        """Close all connections at once; what is under way is gone."""
        for writer in self._writers:
            writer.transport.abort()

    def hold(self) -> None:
        """Let nothing pass until `resume`."""
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        self._writers.add(writer)
        try:
            if self.refusing:
                return
            backend_reader, backend_writer = await self._connect()
            self._writers.add(backend_writer)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pass_on(reader, backend_writer))
                    group.create_task(self._pass_on(backend_reader, writer))
            finally:
                self._writers.discard(backend_writer)
                backend_writer.transport.abort()
        except* OSError:
            pass
        finally:
            self._serving.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._backend, str):
            return await asyncio.open_unix_connection(self._backend)
        return await asyncio.open_connection("127.0.0.1", self._backend)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            await self._open.wait()
            if self.delay:
                await asyncio.sleep(self.delay)
            writer.write(data)
            await writer.drain()
        await self._open.wait()
        if writer.can_write_eof():
            writer.write_eof()
