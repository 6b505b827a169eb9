"""Answers to direct reply-to addresses, on a connection of their own that may be lost.

RabbitMQ before 4.3 ends the connection (541) that publishes to an address it cannot decode: one that a client has made
up, or of a node that has left the cluster. Every version ends the one that asks for such an address. So neither the
leader's publishes nor the requests of a worker may hang on it. The connection is opened when it is needed first.
The first answer to an address goes by itself: then it is known which one ended the connection. Later ones, to an
address that was taken before, go beside each other, and should the connection end, each is tried again by itself. A
connection that cannot be had, or is lost for another reason, is no fault of the address: it is tried again for a while,
and costs its owner nothing but that answer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress

from osrdyne.aio.backoff import Backoff
from osrdyne.aio.clock import Clock
from osrdyne.amqp.channel import Channel
from osrdyne.amqp.connection import Connection
from osrdyne.amqp.message import Message
from osrdyne.errors import (
    AddressRefusedError,
    BrokerAccessError,
    BrokerError,
    BrokerInternalError,
    BrokerNotFoundError,
    BrokerSilentError,
    BrokerUnavailableError,
    PublishRefusedError,
)

DIRECT_REPLY_TO = "amq.rabbitmq.reply-to."
FIRST_THAT_TAKES_ANY = (4, 3)
"""The first version that was seen to take an answer to any address (3.10.8 does not)."""
CONNECT_RETRY = Backoff(initial=0.2, maximum=5.0)
PATIENCE = 60.0
"""Seconds for which an answer waits for a connection; longer, and its caller has mostly gone."""
MAX_PROVEN = 10_000
"""Addresses that are remembered as taken; with more, all are forgotten."""


class DirectReplies:
    """Publishes to direct reply-to addresses, and asks for them."""

    def __init__(self, open_connection: Callable[[], Awaitable[Connection]], *, clock: Clock) -> None:
        self._open_connection = open_connection
        self._clock = clock
        self._connection: Connection | None = None
        self._channel: Channel | None = None
        self._one_at_a_time = asyncio.Lock()
        self._proven: set[str] = set()
        self._failures = 0
        self._retry_at = -math.inf
        self._closed = False

    async def publish(self, message: Message, address: str) -> None:
        """Publish with a confirm. Raises `AddressRefusedError` when RabbitMQ cannot cope with the address, and
        `PublishRefusedError` when there was no connection for too long."""
        if address in self._proven and await self._is_published_beside_others(message, address):
            return
        until = self._clock.monotonic() + PATIENCE
        async with self._one_at_a_time:
            while (fault := await self._try(address, lambda channel: _publish(channel, message, address))) is not None:
                if self._closed:
                    raise fault
                if self._retry_at > until:
                    raise PublishRefusedError(f"There is no connection for answers like this: {fault}") from fault
                await self._clock.sleep(self._retry_at - self._clock.monotonic())
        self._prove(address)

    async def _is_published_beside_others(self, message: Message, address: str) -> bool:
        """False when the connection was lost, for whatever reason: that address is tried by itself next."""
        channel = self._channel
        if channel is None or channel.is_closed:
            return False
        try:
            await _publish(channel, message, address)
        except BrokerSilentError:
            await self._drop()
            raise
        except BrokerUnavailableError:
            self._proven.discard(address)
            return False
        return True

    def _prove(self, address: str) -> None:
        if len(self._proven) >= MAX_PROVEN:
            self._proven.clear()
        self._proven.add(address)

    async def knows(self, address: str) -> bool:
        """Whether somebody consumes there. Raises `BrokerError` when that cannot be told now."""
        if self._clock.monotonic() < self._retry_at:
            raise BrokerUnavailableError("There is no connection for the question.")
        try:
            async with self._one_at_a_time:
                fault = await self._try(address, lambda channel: channel.declare_queue(address, passive=True))
        except (BrokerNotFoundError, AddressRefusedError):
            return False
        if fault is not None:
            raise fault
        return True

    async def _try(self, address: str, act: Callable[[Channel], Awaitable[object]]) -> BrokerError | None:
        """Act once. None when that went well; else why there was no connection for it, or none that lasted."""
        try:
            channel = await self._open()
        except (BrokerUnavailableError, BrokerAccessError) as error:
            return await self._fail(error)
        try:
            await act(channel)
        except BrokerInternalError as error:
            await self._drop()
            raise AddressRefusedError(f"RabbitMQ does not take the reply address {address!r}.") from error
        except BrokerSilentError:
            await self._drop()
            raise
        except BrokerUnavailableError as error:
            return await self._fail(error)
        self._failures = 0
        return None

    async def _fail(self, error: BrokerError) -> BrokerError:
        self._failures += 1
        self._retry_at = self._clock.monotonic() + CONNECT_RETRY.delay(self._failures)
        await self._drop()
        return error

    async def _open(self) -> Channel:
        if self._closed:
            raise BrokerUnavailableError("The connection for answers was closed.")
        if self._channel is not None and not self._channel.is_closed:
            return self._channel
        if self._connection is not None and not self._connection.is_closed:
            with suppress(BrokerUnavailableError):  # a question for an address that is not there costs its channel only
                self._channel = await self._connection.channel(confirms=True)
                return self._channel
        await self._drop()
        self._connection = await self._open_connection()
        self._channel = await self._connection.channel(confirms=True)
        return self._channel

    async def _drop(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            await connection.close()

    async def close(self) -> None:
        """Close the connection, for good."""
        self._closed = True
        await self._drop()


async def _publish(channel: Channel, message: Message, address: str) -> None:
    await channel.publish(message, exchange="", routing_key=address)


class GuardedChannel:
    """A channel to publish on, that leaves what could end its connection to another one.

    `takes_any`: only questions can end it, and no answers.
    """

    def __init__(self, channel: Channel, direct: DirectReplies, *, takes_any: bool = False) -> None:
        self._channel = channel
        self._direct = direct
        self._takes_any = takes_any

    async def publish(self, message: Message, *, exchange: str, routing_key: str, mandatory: bool = False) -> None:
        """As `Channel.publish`."""
        if exchange == "" and routing_key.startswith(DIRECT_REPLY_TO) and not self._takes_any:
            await self._direct.publish(message, routing_key)
        else:
            await self._channel.publish(message, exchange=exchange, routing_key=routing_key, mandatory=mandatory)

    async def knows(self, address: str) -> bool:
        """Whether somebody consumes at this direct reply-to address."""
        return await self._direct.knows(address)

    async def ping(self) -> None:
        await self._channel.ping()

    async def wait_closed(self) -> BaseException | None:
        return await self._channel.wait_closed()

    async def close(self) -> None:
        """Close what this has opened; the channel is its connection's."""
        await self._direct.close()


async def guarded_channel(
    connection: Connection, open_another: Callable[[], Awaitable[Connection]], *, clock: Clock
) -> GuardedChannel:
    """A channel with confirms that no reply address can close."""
    takes_any = _version(connection.server_version) >= FIRST_THAT_TAKES_ANY
    direct = DirectReplies(open_another, clock=clock)
    return GuardedChannel(await connection.channel(confirms=True), direct, takes_any=takes_any)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
