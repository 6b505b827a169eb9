"""The blocking client: `AsyncClient` on an event loop of its own, in a background thread.

Works from any thread, from several at once, and where a loop is running already (Jupyter). It owns the thread; the
thread ends with `close`, with the last reference to the client, or with the interpreter.
"""

from __future__ import annotations

import asyncio
import queue
import ssl
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from osrdyne.aio.clock import Backoff
from osrdyne.client.aio import ANSWER_SLACK, DEFAULT_TIMEOUT, AsyncClient, ConnectionStatus
from osrdyne.client.errors import ClientClosedError
from osrdyne.client.reply import Reply
from osrdyne.client.request import RequestOptions
from osrdyne.client.session import ProgressCallback

T = TypeVar("T")

_CLOSE_TIMEOUT = 15.0
_END_TIMEOUT = 2.0


class Client:
    """Sends requests to one pool and waits for the answers. Use it as `with Client(uri, pool) as client:`.

    Arguments, methods and errors are those of `AsyncClient`; all methods may be called from any thread.
    """

    def __init__(
        self,
        uri: str,
        pool: str = "osrdyne",
        *,
        name: str = "osrdyne-client",
        user_id: str | None = None,
        tls: ssl.SSLContext | None = None,
        default_timeout: float = DEFAULT_TIMEOUT,
        answer_slack: float = ANSWER_SLACK,
        reconnect: Backoff | None = Backoff(),  # noqa: B008 — a frozen value
    ) -> None:
        self._client = AsyncClient(
            uri,
            pool,
            name=name,
            user_id=user_id,
            tls=tls,
            default_timeout=default_timeout,
            answer_slack=answer_slack,
            reconnect=reconnect,
        )
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run_loop, args=(self._loop,), name="osrdyne-client", daemon=True)
        thread.start()
        # Runs on close, when the client is collected, and at the interpreter's exit; whichever comes first.
        self._finalizer = weakref.finalize(self, _shut_down, self._client, self._loop, thread)

    def open(self) -> Self:
        """Connect; `with` does it by itself. Raises what entering an `AsyncClient` raises."""
        try:
            self._wait(self._client.__aenter__())
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Close the connection and end the thread; closing again does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def status(self) -> ConnectionStatus:
        if not self._finalizer.alive:
            return ConnectionStatus.CLOSED
        return self._wait(_status(self._client))

    @property
    def ignored_replies(self) -> int:
        """Unexpected answers: repeated, or too late."""
        return self._client.ignored_replies

    def call(
        self,
        key: str,
        path: str = "",
        body: object = None,
        *,
        on_progress: ProgressCallback | None = None,
        idempotent: bool = False,
        raise_on_error: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Reply:
        """Send a request and wait for its last answer; see `AsyncClient.call`. `on_progress` runs in this thread."""
        if on_progress is None:
            return self._wait(
                self._client.call(key, path, body, idempotent=idempotent, raise_on_error=raise_on_error, **options)
            )
        replies = self.stream(key, path, body, idempotent=idempotent, raise_on_error=raise_on_error, **options)
        for reply in replies:
            if not reply.progress:
                return reply
            on_progress(reply)
        raise AssertionError("a stream ends with an answer or an error")

    def stream(
        self,
        key: str,
        path: str = "",
        body: object = None,
        *,
        idempotent: bool = False,
        raise_on_error: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Reply]:
        """Iterate over the progress and partial answers and then the last one; see `AsyncClient.stream`."""
        replies = self._client.stream(key, path, body, idempotent=idempotent, raise_on_error=raise_on_error, **options)
        arrived: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        pump = self._submit(_pump(replies, arrived))
        pump.add_done_callback(lambda _: arrived.put(None))
        try:
            while (reply := arrived.get()) is not None:
                yield reply
            pump.result()
        finally:
            pump.cancel()

    def cast(
        self,
        key: str,
        path: str = "",
        body: object = None,
        *,
        idempotent: bool = False,
        **options: Unpack[RequestOptions],
    ) -> None:
        """Send a request that wants no answer; see `AsyncClient.cast`."""
        self._wait(self._client.cast(key, path, body, idempotent=idempotent, **options))

    def cancel(self, correlation_id: str) -> bool:
        """Ask for a call under way, of another thread, to be cancelled; see `AsyncClient.cancel`."""
        return self._wait(self._client.cancel(correlation_id))

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = self._submit(coroutine)
        try:
            return future.result()
        finally:
            future.cancel()  # does nothing when it is done; after Ctrl-C it cancels the request

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if not self._finalizer.alive:
            coroutine.close()
            raise ClientClosedError("The client is closed.")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


async def _status(client: AsyncClient) -> ConnectionStatus:
    """Read the status on the client's own loop: whether RabbitMQ blocks a connection is not thread-safe."""
    return client.status


async def _pump(replies: AsyncGenerator[Reply, None], arrived: queue.SimpleQueue[Reply | None]) -> None:
    async with aclosing(replies):
        async for reply in replies:
            arrived.put(reply)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()


def _shut_down(client: AsyncClient, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Close the client on its loop, then end the loop and the thread. Runs in whichever thread lets go last."""
    if threading.current_thread() is thread:  # collected in our own thread: it cannot wait for itself
        loop.stop()
        return
    try:
        asyncio.run_coroutine_threadsafe(_end(client), loop).result(timeout=_CLOSE_TIMEOUT)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        # With a limit: a broker that does not answer must not hold up the end of the program.
        thread.join(timeout=_CLOSE_TIMEOUT)
        if not thread.is_alive():
            loop.close()


async def _end(client: AsyncClient) -> None:
    """Close the client and end the calls of other threads, so that none of them waits without end."""
    await client.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        _, stuck = await asyncio.wait(others, timeout=_END_TIMEOUT)
        for task in stuck:
            task.cancel()
