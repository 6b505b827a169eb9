"""One plain AMQP connection. A lost connection stays lost; its owner decides what follows."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aio_pika
import aiormq
from aio_pika.abc import UnderlayConnection
from aio_pika.exceptions import AMQPConnectionError, ConnectionClosed, InvalidFrameError
from aiormq.abc import AbstractChannel, AbstractConnection
from aiormq.connection import TransportFactory, exception_by_code
from yarl import URL

from osrdyne.amqp.channel import Channel
from osrdyne.amqp.errors import translated
from osrdyne.amqp.publish_numbers import named_returns
from osrdyne.amqp.tls import ssl_context
from osrdyne.amqp.transport import CoalescingTransport
from osrdyne.errors import BrokerError, BrokerUnavailableError, ConfigurationError
from osrdyne.logs import get_logger, mask_uri
from osrdyne.protocol.uri import tls_of

LOG_LEVELS: Mapping[str, str] = {"aio_pika": "critical", "aiormq": "critical"}
"""Levels for the loggers of the libraries: they log connection URLs, and expected failures as errors. Callers log
failures with context."""
ALARM = "a memory or disk alarm"
"""Why RabbitMQ blocks a connection."""
_NO_LIMIT = 65_535
_CLOSE_TIMEOUT = 5.0

log = get_logger("amqp")


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How to connect. Times in seconds; `name` is shown by RabbitMQ. `uri` holds the password.

    Without `tls`, the parameters of an `amqps` URI name the files for TLS (`protocol.uri`).
    """

    uri: str = field(repr=False)
    name: str = "osrdyne"
    heartbeat: int = 30
    connect_timeout: float = 10.0
    rpc_timeout: float = 30.0
    tls: ssl.SSLContext | None = field(default=None, repr=False)


class _Underlay(aiormq.Connection):
    """aiormq's connection below aio-pika's. Its channels buffer received frames without a limit: one that reads slowly
    delays neither the others nor the heartbeats."""

    # No limit for the queue of frames to be sent. aiormq's writer takes from it without waiting for the socket, so that
    # a limit would save no memory. With one, an acknowledgement that waits for room when the connection is lost would
    # wait without end.
    FRAME_BUFFER_SIZE = 0
    _observer: asyncio.Future[Any] | None = None

    @property
    def closing(self) -> asyncio.Future[Any]:
        self._observer = super().closing
        return self._observer

    async def channel(
        self,
        channel_number: int | None = None,
        publisher_confirms: bool = True,
        frame_buffer_size: int = 0,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> AbstractChannel:
        # aio-pika has just added an observer of the connection for this channel. It does not remove it at the end of
        # the channel, which leaks 4 KiB for each (https://github.com/mosquito/aio-pika/issues/490).
        observer, self._observer = self._observer, None
        assert observer is not None
        try:
            channel = await super().channel(channel_number, publisher_confirms, frame_buffer_size, timeout, **kwargs)
        except BaseException:
            observer.cancel()
            raise
        channel.frames.put = named_returns(channel.frames.put)  # type: ignore[assignment, method-assign]
        channel.closing.add_done_callback(lambda _: observer.cancel())
        return channel


class _UnderlayConnection(UnderlayConnection):
    @classmethod
    async def make_connection(cls, url: URL, timeout: float | None = None, **kwargs: Any) -> AbstractConnection:
        connection = _Underlay(url, **kwargs)
        try:
            async with asyncio.timeout(timeout):
                await connection.connect()
                await connection.ready()
        except BaseException:
            # Cancelled, or blocked for too long, after the log-in: nothing else would close the connection.
            if connection.is_opened:
                await connection.close()
            raise
        return connection


class _PlainConnection(aio_pika.Connection):
    """aio-pika's plain connection over an `_Underlay` and the given transport."""

    def __init__(self, url: URL, *, ssl_context: ssl.SSLContext | None, transport_factory: TransportFactory) -> None:
        super().__init__(url, ssl_context=ssl_context)
        self.kwargs["transport_factory"] = transport_factory

    async def connect(self, timeout: float | None = None) -> None:
        self.transport = await _UnderlayConnection.connect(self.url, self._on_closed, timeout=timeout, **self.kwargs)
        self.connected.set()

    def __del__(self) -> None:
        """Do nothing: aio-pika's finalizer starts a task in any thread that collects a lost connection."""

    async def _on_closed(self, closing: asyncio.Future[Any]) -> None:
        self.connected.clear()
        await self.close_callbacks(None if closing.cancelled() else closing.exception())


class Connection:
    """An open connection; see `connect`."""

    def __init__(
        self, options: ConnectionOptions, connection: aio_pika.Connection, transport: CoalescingTransport
    ) -> None:
        assert connection.transport is not None, "the connection must be open"
        self.options = options
        self.closed_here = False  # Whether this side has closed the connection.
        self._connection = connection
        self._transport = transport
        self._last_number = 0
        # aio-pika exposes neither the blocked state of the connection nor the version, limits and end.
        self._underlay = connection.transport.connection

    @property
    def is_closed(self) -> bool:
        # Read for each message, hence not `is_opened`, which takes ten times as long.
        return self._transport.is_lost or self._underlay.is_closed

    @property
    def is_blocked(self) -> bool:
        """Whether RabbitMQ has blocked the connection, because of a memory or disk alarm, and reads nothing from it."""
        return self._transport.is_blocked and not self.is_closed

    async def wait_unblocked(self) -> None:
        """Wait until the connection is not blocked, or is closed."""
        ready = asyncio.ensure_future(self._underlay.ready())
        closed = self._underlay.closing
        try:
            await asyncio.wait({ready, closed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            closed.cancel()

    @property
    def server_version(self) -> str:
        """The version of RabbitMQ, such as "3.10.8"; empty if it sends none."""
        version = self._underlay.server_properties.get("version")
        return version if isinstance(version, str) else ""

    @property
    def max_channels(self) -> int:
        """How many channels may be open at once; RabbitMQ closes a connection that opens one more."""
        return self._underlay.connection_tune.channel_max or _NO_LIMIT

    async def wait_closed(self) -> BaseException | None:
        """Wait until the connection is closed; return the reason, or None if this side closed it."""
        closing = self._underlay.closing
        await asyncio.wait({closing})
        return None if self.closed_here or closing.cancelled() else closing.exception()

    async def channel(self, *, confirms: bool = False) -> Channel:
        """Open a channel; with `confirms`, publishes wait for the broker's confirm."""
        with translated("open a channel"):
            async with asyncio.timeout(self.options.rpc_timeout):
                # While the connection is blocked, aio-pika would wait, even if the connection is lost meanwhile.
                while self.is_blocked:
                    await self.wait_unblocked()
                if self.is_closed:
                    raise BrokerUnavailableError("Could not open a channel: the connection to RabbitMQ is closed.")
                channel = self._connection.channel(
                    self._next_number(), publisher_confirms=confirms, on_return_raises=confirms
                )
                await channel.initialize()
            underlay = await channel.get_underlay_channel()
        assert isinstance(underlay, aiormq.Channel)
        return Channel(self, channel, underlay)

    def _next_number(self) -> int:
        """Return the number for a new channel: the one that has been free for longest.

        aiormq would take the number after the highest used one, which often has just become free. A late frame from or
        to the last channel of this number would then close the new channel.
        """
        used = self._underlay.channels
        for _ in range(self.max_channels):
            self._last_number = self._last_number % self.max_channels + 1
            if self._last_number not in used:
                return self._last_number
        raise BrokerUnavailableError(f"The connection has the {self.max_channels} channels that RabbitMQ allows.")

    async def close(self, *, timeout: float = _CLOSE_TIMEOUT) -> None:
        """Close the connection; never raises. `timeout`: seconds that RabbitMQ has to answer, which it does not do on a
        blocked connection."""
        self.closed_here |= not self.is_closed
        # In a task: aio-pika waits for its own callback even when it is cancelled.
        closing = asyncio.ensure_future(self._connection.close(asyncio.CancelledError))
        closing.add_done_callback(lambda done: done.cancelled() or done.exception())
        done, _ = await asyncio.wait({closing}, timeout=timeout)
        if not done:
            # RabbitMQ does not answer. Its heartbeat time-out ends the connection there.
            self._transport.abort()
            await asyncio.wait({closing}, timeout=_CLOSE_TIMEOUT)


async def connect(options: ConnectionOptions, *, transport: CoalescingTransport | None = None) -> Connection:
    """Open a connection, by default over a new transport.

    Raises `BrokerUnavailableError` if RabbitMQ cannot be reached, `BrokerAccessError` if it refuses the credentials or
    the virtual host, `ConfigurationError` if the URI is not an AMQP URI or names a TLS file that cannot be used.
    """
    url = _parse_uri(options.uri).with_query(heartbeat=str(options.heartbeat), name=options.name)
    context = _context(options) if url.scheme == "amqps" else None
    transport = transport or CoalescingTransport()
    transport.on_block = partial(_log_block, options.name)
    connection = _PlainConnection(url, ssl_context=context, transport_factory=transport)
    try:
        await _open(connection, transport, options.connect_timeout, where=mask_uri(str(url.with_query(None))))
    except BaseException:
        await connection.close()
        raise
    transport.end_login()
    return Connection(options, connection, transport)


def _log_block(name: str, blocked: bool) -> None:
    if blocked:
        log.warning("RabbitMQ accepts no messages", connection=name, reason=ALARM)
    else:
        log.info("RabbitMQ accepts messages again", connection=name)


async def _open(
    connection: aio_pika.Connection, transport: CoalescingTransport, connect_timeout: float, *, where: str
) -> None:
    try:
        with translated(f"connect to {where}"):
            try:
                await connection.connect(timeout=connect_timeout)
            except (ConnectionClosed, InvalidFrameError) as error:
                if (close := transport.refusal()) is not None:
                    raise exception_by_code(close) from error
                raise
    except BrokerError as error:
        if _was_cut_off(error.__cause__):
            raise BrokerUnavailableError(
                f"RabbitMQ closed the connection during the log-in to {where}. If this continues, check whether "
                + ("it demands a client certificate." if where.startswith("amqps") else "this is a port for TLS.")
            ) from error
        raise


def _was_cut_off(error: BaseException | None) -> bool:
    """Whether the peer closed the socket without a reason, as it does after a refused TLS handshake."""
    return isinstance(error, AMQPConnectionError) and isinstance(
        error.__cause__, ConnectionResetError | asyncio.IncompleteReadError
    )


def _context(options: ConnectionOptions) -> ssl.SSLContext:
    if options.tls is not None:
        return options.tls
    try:
        files = tls_of(options.uri)
    except ValueError as error:
        raise ConfigurationError(f"The AMQP URI: {error}.") from None
    return ssl_context(files)


def _parse_uri(uri: str) -> URL:
    try:
        url = URL(uri)
    except ValueError:
        url = URL()
    if url.scheme not in {"amqp", "amqps"} or not url.host:
        raise ConfigurationError("The broker URI must look like amqp://user:password@host:5672/vhost.")
    return url
