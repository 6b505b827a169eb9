"""The leader's publisher: channels with confirms, on a connection of its own (lifecycle: token-channel-never-fails).

A publish may cause an error that closes its connection (541 on RabbitMQ 3.10), and an alarm blocks connections that
publish: neither may affect the channel that holds the token. `isolation` keeps a queue that confirms nothing from
delaying others. The default exchange has a channel of its own: RabbitMQ closes the channel of a refused answer, and the
other publishes in flight there fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from osrdyne.aio.clock import Backoff, Clock
from osrdyne.amqp import Channel, Connection, Message
from osrdyne.amqp.direct_reply_to import DIRECT_REPLY_TO, GuardedChannel, guarded_channel
from osrdyne.broker.publishing.isolation import Destinations
from osrdyne.errors import BrokerSilentError, BrokerUnavailableError, PublishRefusedError
from osrdyne.logs import Logger

REPUBLISH_RETRY = Backoff(initial=0.5, maximum=10.0)


class LeaderPublisher:
    """Publishes with confirms; many publishes may be in flight at once."""

    def __init__(
        self,
        channel: Channel,
        connection: Connection,
        *,
        clock: Clock,
        default_exchange: Channel | GuardedChannel | None = None,
    ) -> None:
        """`default_exchange`: the channel for messages to it, if not `channel`."""
        self._channel = channel
        self._default_exchange = channel if default_exchange is None else default_exchange
        self._destinations = Destinations(self._shared, connection, clock=clock)

    @classmethod
    async def open(
        cls, connection: Connection, *, open_another: Callable[[], Awaitable[Connection]], clock: Clock
    ) -> LeaderPublisher:
        """`open_another` opens a connection for replies that could close it."""
        guarded = await guarded_channel(connection, open_another, clock=clock, reopens=True)
        return cls(await connection.channel(confirms=True), connection, clock=clock, default_exchange=guarded)

    def _shared(self, exchange: str) -> Channel | GuardedChannel:
        """The channel for messages to an exchange."""
        return self._channel if exchange else self._default_exchange

    async def run(self) -> None:
        """Close unused channels. Raises `BrokerUnavailableError` when RabbitMQ has closed one."""
        await self._destinations.run()

    async def wait_closed(self) -> BaseException | None:
        """Wait until a shared channel is closed; return the reason, or None if this side closed it."""
        ends = {asyncio.ensure_future(one.wait_closed()) for one in (self._channel, self._default_exchange)}
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for end in ends:
                end.cancel()

    async def publish(self, message: Message, *, exchange: str, routing_key: str, mandatory: bool = False) -> None:
        """Publish and wait for the confirm.

        Raises `PublishRefusedError` if RabbitMQ refuses the message; `BrokerSilentError` if a queue does not confirm it
        (it has lost its Raft leader), which concerns that queue alone; `BrokerUnavailableError` if the connection is
        silent or lost. After the last two RabbitMQ may have the message.
        """

        async def send(channel: Channel | GuardedChannel) -> None:
            try:
                await channel.publish(message, exchange=exchange, routing_key=routing_key, mandatory=mandatory)
            except BrokerSilentError as silence:
                await self._ping(self._shared(exchange))  # the queue is silent, or the whole connection
                raise silence

        if exchange == "" and routing_key.startswith(DIRECT_REPLY_TO):
            await send(self._default_exchange)  # no queue confirms it, so none can stall the channel
        else:
            await self._destinations.publish(exchange, routing_key, send)

    async def _ping(self, channel: Channel | GuardedChannel) -> None:
        """Raise `BrokerUnavailableError`, and not `BrokerSilentError`, if the connection itself is silent."""
        try:
            await channel.ping()
        except BrokerUnavailableError as error:
            raise BrokerUnavailableError("The publishing connection does not answer.") from error


async def publish_until_taken(publish: Callable[[], Awaitable[None]], *, clock: Clock, log: Logger) -> None:
    """Publish a request that a probe received, until RabbitMQ confirms it.

    Without a confirm RabbitMQ may have it or not, so it is published again: two copies are allowed, a loss is not.
    """
    failures = 0
    while True:
        try:
            await publish()
            return
        except (PublishRefusedError, BrokerSilentError) as error:
            failures += 1
            log.error("probed request not accepted", error=str(error))
            # The probe still holds the request unacknowledged: a crash here returns it to its queue.
            await clock.sleep(REPUBLISH_RETRY.delay(failures))
