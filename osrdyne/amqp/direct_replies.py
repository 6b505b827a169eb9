"""Answers to direct reply-to addresses, on a connection of their own that may be lost.

RabbitMQ before 4.3 ends the connection (541) that publishes to an address it cannot decode: one that a client has made
up, or of a node that has left the cluster. Every version ends the one that asks for such an address. So neither the
leader's publishes nor the requests of a worker may hang on it. The connection is opened when it is needed first.
Answers go one at a time: then it is known which one ended it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from osrdyne.amqp.channel import Channel
from osrdyne.amqp.connection import Connection
from osrdyne.amqp.message import Message
from osrdyne.errors import AddressRefusedError, BrokerNotFoundError, BrokerSilentError, BrokerUnavailableError

DIRECT_REPLY_TO = "amq.rabbitmq.reply-to."
FIRST_THAT_TAKES_ANY = (4, 3)
"""The first version that was seen to take an answer to any address (3.10.8 does not)."""


class DirectReplies:
    """Publishes to direct reply-to addresses, and asks for them."""

    def __init__(self, open_connection: Callable[[], Awaitable[Connection]]) -> None:
        self._open_connection = open_connection
        self._connection: Connection | None = None
        self._channel: Channel | None = None
        self._one_at_a_time = asyncio.Lock()

    async def publish(self, message: Message, address: str) -> None:
        """Publish with a confirm. Raises `AddressRefusedError` when the address has just ended a new connection, and
        what `connect` raises when there is none."""
        await self._try(address, lambda channel: channel.publish(message, exchange="", routing_key=address))

    async def knows(self, address: str) -> bool:
        """Whether somebody consumes there. Raises `BrokerUnavailableError` when that cannot be told."""
        try:
            await self._try(address, lambda channel: channel.declare_queue(address, passive=True))
        except (BrokerNotFoundError, AddressRefusedError):
            return False
        return True

    async def _try(self, address: str, act: Callable[[Channel], Awaitable[object]]) -> None:
        async with self._one_at_a_time:
            while True:
                channel, is_new = await self._open()
                try:
                    await act(channel)
                    return
                except BrokerSilentError:
                    await self.close()
                    raise
                except BrokerUnavailableError as error:
                    await self.close()
                    if is_new:  # an older one may have been lost for another reason: then this is tried again
                        raise AddressRefusedError(f"RabbitMQ does not take the reply address {address!r}.") from error

    async def _open(self) -> tuple[Channel, bool]:
        """A channel, and whether its connection is new."""
        if self._channel is not None and not self._channel.is_closed:
            return self._channel, False
        if self._connection is not None and not self._connection.is_closed:
            with suppress(BrokerUnavailableError):  # a question for an address that is not there costs its channel only
                self._channel = await self._connection.channel(confirms=True)
                return self._channel, False
        await self.close()
        self._connection = await self._open_connection()
        self._channel = await self._connection.channel(confirms=True)
        return self._channel, True

    async def close(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            await connection.close()


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


async def guarded_channel(connection: Connection, open_another: Callable[[], Awaitable[Connection]]) -> GuardedChannel:
    """A channel with confirms that no reply address can close."""
    takes_any = _version(connection.server_version) >= FIRST_THAT_TAKES_ANY
    return GuardedChannel(await connection.channel(confirms=True), DirectReplies(open_another), takes_any=takes_any)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
