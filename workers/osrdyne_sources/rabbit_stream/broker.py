"""RabbitMQ for code that blocks: Spark calls a source from threads without an event loop.

The event loop runs in a thread of its own, so that it answers heartbeats while Spark works on a batch.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from osrdyne.amqp.connection import ConnectionOptions
from osrdyne.amqp.stream_frames import StreamMessage
from osrdyne.amqp.streams import StreamConnection, StreamRange
from osrdyne.errors import BrokerSilentError, BrokerUnavailableError, ConfigurationError
from osrdyne_sources.rabbit_stream.options import Options

_Result = TypeVar("_Result")
_RECONNECT_DELAY = 1.0
_MAX_URI_BYTES = 16_384


def read_uri(path: str) -> str:
    """Read the AMQP URI. Raises `ConfigurationError`, which contains nothing of the file."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            uri = file.read(_MAX_URI_BYTES).strip()
    except OSError as error:
        raise ConfigurationError(
            f"The option uriFile: cannot read {path}: {error.strerror}. The file must be on each host that reads."
        ) from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"The option uriFile: {path} is not a text in UTF-8.") from None
    if not uri or len(uri.split()) != 1:
        raise ConfigurationError(f"The option uriFile: {path} must contain one AMQP URI and nothing else.")
    return uri


class BlockingBroker:
    """One connection that is opened when it is needed, and again after it was lost.

    Use it in one thread, as a context manager or with `close`.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._connection: StreamConnection | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="osrdyne rabbitmq-stream", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end the thread; calling it again does nothing."""
        if self._loop.is_closed():
            return
        if self._connection is not None:
            self._run(self._connection.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def bounds(self) -> dict[str, StreamRange | None]:
        """Return the offsets that each stream has now. Tries again once after a lost connection."""
        try:
            return self._run(self._bounds())
        except BrokerSilentError:
            raise
        except BrokerUnavailableError:
            return self._run(self._bounds())

    async def _bounds(self) -> dict[str, StreamRange | None]:
        connection = await self._connected()
        async with asyncio.TaskGroup() as group:
            tasks = {stream: group.create_task(connection.bounds(stream)) for stream in self._options.streams}
        return {stream: task.result() for stream, task in tasks.items()}

    def first_after(self, stream: str, bounds: StreamRange, is_after: Callable[[StreamMessage], bool]) -> int:
        """Return the first offset of a range from which on `is_after` is true; see `StreamConnection.first_after`."""
        return self._run(self._first_after(stream, bounds, is_after))

    async def _first_after(self, stream: str, bounds: StreamRange, is_after: Callable[[StreamMessage], bool]) -> int:
        return await (await self._connected()).first_after(stream, bounds, is_after)

    def read(self, stream: str, wanted: StreamRange) -> Generator[list[StreamMessage]]:
        """Read a range in order. After a lost connection, connects again and continues at the next message; gives up
        after `timeout` without a message."""
        options, lost = self._options, None
        while True:
            with self._reading(stream, wanted) as next_messages:
                try:
                    while (messages := next_messages()) is not None:
                        wanted, lost = StreamRange(messages[-1].offset + 1, wanted.stop), None
                        yield messages
                    return
                except BrokerSilentError:
                    raise
                except BrokerUnavailableError:
                    lost = lost or time.monotonic()
                    if time.monotonic() - lost >= options.timeout:
                        raise
            time.sleep(_RECONNECT_DELAY)

    @contextmanager
    def _reading(self, stream: str, wanted: StreamRange) -> Iterator[Any]:
        options = self._options
        messages: Any = None

        async def begin() -> Any:
            connection = await self._connected()
            return connection.read(
                stream, wanted, prefetch=options.prefetch, fail_on_data_loss=options.fail_on_data_loss
            )

        def next_messages() -> list[StreamMessage] | None:
            nonlocal messages
            messages = messages or self._run(begin())
            found: list[StreamMessage] | None = self._run(_next(messages))
            return found

        try:
            yield next_messages
        finally:
            if messages is not None:
                self._run(messages.aclose())

    async def _connected(self) -> StreamConnection:
        if self._connection is None or self._connection.is_closed:
            options = ConnectionOptions(
                uri=read_uri(self._options.uri_file),
                name="osrdyne rabbitmq-stream",
                connect_timeout=self._options.timeout,
                rpc_timeout=self._options.timeout,
            )
            self._connection = await StreamConnection.open(options, silence=self._options.timeout)
        return self._connection

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except BaseExceptionGroup as group:
            raise _first(group) from None


async def _next(messages: Any) -> list[StreamMessage] | None:
    return await anext(messages, None)


def _first(error: BaseException) -> BaseException:
    """Return the first error of a task group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
