"""The blocking client: `AsyncClient` on an event loop of its own, in a background thread.

It may be used from any thread, from several at once, where an event loop is running already (Jupyter), and in a process
that was forked after the client was made (gunicorn with `preload_app`, multiprocessing). The thread ends with `close`,
with the last reference to the client, or with the interpreter.
"""

from __future__ import annotations

import asyncio
import os
import queue
import ssl
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from osrdyne.aio.clock import Backoff
from osrdyne.client.aio import ANSWER_SLACK, DEFAULT_TIMEOUT, AsyncClient, ConnectionStatus
from osrdyne.client.errors import ClientClosedError
from osrdyne.client.progress import StartCallback
from osrdyne.client.reply import Reply
from osrdyne.client.request import RequestOptions
from osrdyne.client.session import JobsCallback, ProgressCallback
from osrdyne.protocol.progress import JobProgress, StartProgress
from osrdyne.protocol.streams import DEFAULT_CREDIT

T = TypeVar("T")

_after_fork = threading.Lock()
_of_parents: list[tuple[AsyncClient, asyncio.AbstractEventLoop]] = []
"""Clients and loops that a fork has copied. Never used, and never collected."""

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
        token: str | Callable[[], str] | None = None,
        tls: ssl.SSLContext | None = None,
        default_timeout: float = DEFAULT_TIMEOUT,
        answer_slack: float = ANSWER_SLACK,
        reconnect: Backoff | None = Backoff(),  # noqa: B008 — a frozen value
    ) -> None:
        self._make_client = partial(
            AsyncClient,
            uri,
            pool,
            name=name,
            user_id=user_id,
            token=token,
            tls=tls,
            default_timeout=default_timeout,
            answer_slack=answer_slack,
            reconnect=reconnect,
        )
        self._is_open = False
        self._begin()

    def _begin(self) -> None:
        """Start the loop and its thread, in this process."""
        self._pid = os.getpid()
        self._own_client = self._make_client()
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run_loop, args=(self._loop,), name="osrdyne-client", daemon=True)
        thread.start()
        # Called once: by `close`, when the client is collected, or at the interpreter's exit.
        self._finalizer = weakref.finalize(self, _shut_down, self._own_client, self._loop, thread, self._pid)

    @property
    def _client(self) -> AsyncClient:
        """The client of this process. Raises the errors of entering an `AsyncClient`.

        A fork copies neither the thread nor, usably, the connection: the first call in a child connects anew.
        """
        if os.getpid() != self._pid:
            with _after_fork:
                if os.getpid() != self._pid and self._finalizer.detach() is not None:
                    # Kept as they are: closing the loop would end the watches of the parent, which shares its selector.
                    _of_parents.append((self._own_client, self._loop))
                    self._begin()
                    if self._is_open:
                        self._wait(self._own_client.__aenter__())
        return self._own_client

    def open(self) -> Self:
        """Connect, as `with` does. Raises the errors of entering an `AsyncClient`."""
        try:
            self._wait(self._client.__aenter__())
            self._is_open = True
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
        """The number of answers without a waiting call: repeated, or too late."""
        return self._client.ignored_replies

    def call(
        self,
        key: str,
        path: str = "",
        body: object = None,
        *,
        on_progress: ProgressCallback | None = None,
        on_starting: StartCallback | None = None,
        on_jobs: JobsCallback | None = None,
        idempotent: bool = False,
        raise_on_error: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Reply:
        """Send a request and wait for its last answer; see `AsyncClient.call`. The callbacks run in this thread."""
        if on_progress is None and on_starting is None and on_jobs is None:
            return self._wait(
                self._client.call(key, path, body, idempotent=idempotent, raise_on_error=raise_on_error, **options)
            )
        arrived: queue.SimpleQueue[Reply | StartProgress | JobProgress | None] = queue.SimpleQueue()
        call = self._submit(
            self._client.call(
                key,
                path,
                body,
                on_progress=None if on_progress is None else arrived.put,
                on_starting=None if on_starting is None else arrived.put,
                on_jobs=None if on_jobs is None else arrived.put,
                idempotent=idempotent,
                raise_on_error=raise_on_error,
                **options,
            )
        )
        call.add_done_callback(lambda _: arrived.put(None))
        try:
            while (item := arrived.get()) is not None:
                if isinstance(item, StartProgress):
                    assert on_starting is not None
                    on_starting(item)
                elif isinstance(item, JobProgress):
                    assert on_jobs is not None
                    on_jobs(item)
                elif on_progress is not None:
                    on_progress(item)
            return call.result()
        finally:
            call.cancel()

    def stream(
        self,
        key: str,
        path: str = "",
        body: object = None,
        *,
        on_starting: StartCallback | None = None,
        idempotent: bool = False,
        raise_on_error: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Reply]:
        """Iterate over the progress and partial answers and then the last one; see `AsyncClient.stream`.
        `on_starting` runs in this thread."""
        arrived: queue.SimpleQueue[Reply | StartProgress | None] = queue.SimpleQueue()
        replies = self._client.stream(
            key,
            path,
            body,
            on_starting=None if on_starting is None else arrived.put,
            idempotent=idempotent,
            raise_on_error=raise_on_error,
            **options,
        )
        pump = self._submit(_pump(replies, arrived))
        pump.add_done_callback(lambda _: arrived.put(None))
        try:
            while (item := arrived.get()) is not None:
                if not isinstance(item, StartProgress):
                    yield item
                elif on_starting is not None:
                    on_starting(item)
            pump.result()
        finally:
            pump.cancel()

    def call_batches(
        self,
        key: str,
        path: str = "",
        body: object = None,
        *,
        credit: int = DEFAULT_CREDIT,
        idempotent: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Any]:
        """Iterate over the `pyarrow.RecordBatch`es of a streamed answer; see `AsyncClient.call_batches`."""
        return self._each(self._client.call_batches(key, path, body, credit=credit, idempotent=idempotent, **options))

    def call_parts(
        self,
        key: str,
        path: str = "",
        body: object = None,
        *,
        credit: int = DEFAULT_CREDIT,
        idempotent: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Iterator[bytes]:
        """Iterate over the undecoded parts of a streamed answer; see `AsyncClient.call_parts`."""
        return self._each(self._client.call_parts(key, path, body, credit=credit, idempotent=idempotent, **options))

    def _each(self, values: AsyncGenerator[T, None]) -> Iterator[T]:
        """Iterate over the values. Each is requested when the caller wants it, which limits how far the worker is
        ahead."""
        # After Ctrl-C the cancelled request for the next value still ends: the generator cannot be closed before that.
        turn = asyncio.Lock()
        try:
            while (value := self._wait(_next(values, turn))) is not None:
                yield value
        finally:
            if self._finalizer.alive:  # otherwise the call has ended with the client
                self._wait(_close(values, turn))

    def cast(
        self,
        key: str,
        path: str = "",
        body: object = None,
        *,
        idempotent: bool = False,
        **options: Unpack[RequestOptions],
    ) -> None:
        """Send a request without an answer; see `AsyncClient.cast`."""
        self._wait(self._client.cast(key, path, body, idempotent=idempotent, **options))

    def cancel(self, correlation_id: str) -> bool:
        """Cancel a call in flight of another thread; see `AsyncClient.cancel`."""
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
    """Read the status on the client's own loop: `is_blocked` of a connection is not thread-safe."""
    return client.status


async def _next(values: AsyncGenerator[T, None], turn: asyncio.Lock) -> T | None:
    async with turn:
        return await anext(values, None)


async def _close(values: AsyncGenerator[T, None], turn: asyncio.Lock) -> None:
    async with turn:
        await values.aclose()


async def _pump(replies: AsyncGenerator[Reply, None], arrived: queue.SimpleQueue[Reply | StartProgress | None]) -> None:
    async with aclosing(replies):
        async for reply in replies:
            arrived.put(reply)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()


def _renew_lock() -> None:
    """In a child: another thread of the parent may have held the lock, and does not exist here."""
    global _after_fork
    _after_fork = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def _shut_down(client: AsyncClient, loop: asyncio.AbstractEventLoop, thread: threading.Thread, pid: int) -> None:
    """Close the client on its loop, then end the loop and the thread. Runs in the thread that drops the client."""
    if os.getpid() != pid:  # in a child that has not used the client
        return
    if threading.current_thread() is thread:  # the client was collected in its own thread, which cannot join itself
        loop.stop()
        return
    try:
        asyncio.run_coroutine_threadsafe(_end(client), loop).result(timeout=_CLOSE_TIMEOUT)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        # With a limit: a broker that does not answer must not delay the exit of the program.
        thread.join(timeout=_CLOSE_TIMEOUT)
        if not thread.is_alive():
            loop.close()


async def _end(client: AsyncClient) -> None:
    """Close the client and end the calls of other threads, which would otherwise wait forever."""
    await client.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        _, stuck = await asyncio.wait(others, timeout=_END_TIMEOUT)
        for task in stuck:
            task.cancel()
