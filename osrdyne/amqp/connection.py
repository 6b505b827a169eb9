"""One AMQP connection, plain: when it is lost it stays lost, and its owner is told."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from typing import Any

import aiormq
from aiormq.connection import FrameReceiver, exception_by_code
from pamqp import commands as spec
from yarl import URL

from osrdyne.amqp.channel import Channel
from osrdyne.amqp.errors import translated
from osrdyne.amqp.tls import ssl_context
from osrdyne.amqp.transport import CoalescingTransport
from osrdyne.errors import BrokerError, BrokerUnavailableError, ConfigurationError
from osrdyne.logs import mask_uri
from osrdyne.protocol.uri import tls_of

_NO_LIMIT = 65_535
_ACCESS_REFUSED = 403
"""aiormq understands this one: the wrong password."""


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How to connect. Times in seconds; `name` is what RabbitMQ shows for the connection. `uri` holds the password.

    Without `tls`, an `amqps` URI says itself which files to use (`protocol.uri`).
    """

    uri: str = field(repr=False)
    name: str = "osrdyne"
    heartbeat: int = 30
    connect_timeout: float = 10.0
    rpc_timeout: float = 30.0
    tls: ssl.SSLContext | None = field(default=None, repr=False)


class _Underlay(aiormq.Connection):
    """aiormq's connection, that tells why the broker closes it during the log-in.

    aiormq takes `connection.close` for a frame out of place there, and drops code and text: "no such virtual host",
    "too many connections", "the virtual host is down" and "RabbitMQ stops" would all be the same.
    """

    @staticmethod
    async def _rpc(
        request: Any, writer: asyncio.StreamWriter, frame_receiver: FrameReceiver, wait_response: bool = True
    ) -> Any:
        return await aiormq.Connection._rpc(request, writer, _HearsClose(frame_receiver), wait_response)  # type: ignore[arg-type]


class _HearsClose:
    def __init__(self, frames: FrameReceiver) -> None:
        self._frames = frames

    async def get_frame(self) -> Any:
        received = await self._frames.get_frame()
        frame = received[-1]
        if isinstance(frame, spec.Connection.Close) and frame.reply_code != _ACCESS_REFUSED:
            raise exception_by_code(frame)
        return received


class Connection:
    """An open connection; see `connect`."""

    def __init__(self, options: ConnectionOptions, underlay: aiormq.Connection) -> None:
        self.options = options
        self._underlay = underlay
        # aiormq keeps the broker's connection.blocked notice in a private event; there is no public question for it.
        self._unblocked: asyncio.Event = underlay._Connection__connection_unblocked  # type: ignore[attr-defined]

    @property
    def is_closed(self) -> bool:
        return not self._underlay.is_opened

    @property
    def is_blocked(self) -> bool:
        """Whether the broker has announced that it reads nothing from this connection (memory or disk alarm)."""
        return not self._unblocked.is_set() and not self.is_closed

    async def wait_unblocked(self) -> None:
        """Return once the broker reads from this connection again, or the connection is closed."""
        unblocked = asyncio.ensure_future(self._unblocked.wait())
        closed = self._underlay.closing
        try:
            await asyncio.wait({unblocked, closed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            unblocked.cancel()
            closed.cancel()

    @property
    def server_version(self) -> str:
        """The broker's version as it says, "3.10.8"."""
        version = self._underlay.server_properties.get("version")
        return version if isinstance(version, str) else ""

    @property
    def max_channels(self) -> int:
        """How many channels may be open at once; one more, and the broker ends the connection."""
        return self._underlay.connection_tune.channel_max or _NO_LIMIT

    async def wait_closed(self) -> BaseException | None:
        """Wait until the connection is closed; the reason, or None when it was closed by us."""
        closing = self._underlay.closing
        await asyncio.wait({closing})
        return None if closing.cancelled() else closing.exception()

    async def channel(self, *, confirms: bool = False) -> Channel:
        """Open a channel; with `confirms`, publishes wait for the broker's confirm."""
        with translated("open a channel"):
            underlay = await self._underlay.channel(
                publisher_confirms=confirms, timeout=self.options.rpc_timeout, frame_buffer_size=0
            )
        assert isinstance(underlay, aiormq.Channel)
        return Channel(self, underlay)

    async def close(self) -> None:
        """Close the connection; never raises, never takes longer than a few seconds."""
        try:
            with translated("close the connection"):
                await self._underlay.close(timeout=5)
        except BrokerError:
            return


async def connect(options: ConnectionOptions) -> Connection:
    """Open a connection.

    Raises `BrokerUnavailableError` when RabbitMQ cannot be reached, `BrokerAccessError` when it refuses the
    credentials or the virtual host, `ConfigurationError` when the URI is not an AMQP URI or names a file for TLS that
    is of no use.
    """
    url = _parse_uri(options.uri).with_query(heartbeat=str(options.heartbeat), name=options.name)
    context = _context(options) if url.scheme == "amqps" else None
    underlay = _Underlay(url, context=context, transport_factory=CoalescingTransport())
    try:
        await _open(underlay, options.connect_timeout, where=mask_uri(str(url.with_query(None))))
    except BaseException:
        if underlay.is_opened:
            await underlay.close()
        raise
    return Connection(options, underlay)


async def _open(underlay: aiormq.Connection, connect_timeout: float, *, where: str) -> None:
    try:
        with translated(f"connect to {where}"):
            async with asyncio.timeout(connect_timeout):
                await underlay.connect()
                await underlay.ready()
    except BrokerError as error:
        if _was_cut_off(error.__cause__):
            raise BrokerUnavailableError(
                f"RabbitMQ closed the connection during the log-in to {where}. If it goes on: "
                + ("does it want a client certificate?" if where.startswith("amqps") else "is this a port for TLS?")
            ) from error
        raise


def _was_cut_off(error: BaseException | None) -> bool:
    """Whether the peer hung up without a word, which is all that one side may see of a refused TLS handshake."""
    return isinstance(error, aiormq.AMQPConnectionError) and isinstance(
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
