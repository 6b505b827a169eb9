"""The leader's publisher: channels with confirms, on a connection of its own (lifecycle: token-channel-never-fails).

A publish can draw an error that kills its connection (541 on RabbitMQ 3.10), and an alarm blocks the connections that
publish: neither may touch the channel that holds the token. A queue that confirms nothing holds up no other (`trials`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from osrdyne.aio.clock import Backoff, Clock
from osrdyne.amqp import Channel, Connection, Message
from osrdyne.amqp.direct_reply_to import DIRECT_REPLY_TO, GuardedChannel, guarded_channel
from osrdyne.broker.publishing.isolation import Destinations
from osrdyne.errors import BrokerSilentError, BrokerUnavailableError, PublishRefusedError
from osrdyne.logs import Logger

GIVE_BACK_RETRY = Backoff(initial=0.5, maximum=10.0)


class LeaderPublisher:
    """Publishes with confirms; many publishes may be under way at once."""

    def __init__(self, channel: Channel | GuardedChannel, connection: Connection, *, clock: Clock) -> None:
        self._channel = channel
        self._destinations = Destinations(channel, connection, clock=clock)

    @classmethod
    async def open(
        cls, connection: Connection, *, open_another: Callable[[], Awaitable[Connection]], clock: Clock
    ) -> LeaderPublisher:
        """`open_another`: a connection for answers that could end it."""
        return cls(await guarded_channel(connection, open_another, clock=clock), connection, clock=clock)

    async def run(self) -> None:
        """Close the channels that are not needed any more. Raises `BrokerUnavailableError` when one was lost."""
        await self._destinations.run()

    async def wait_closed(self) -> BaseException | None:
        """Wait until nothing can be published any more; the reason, or None when it was closed by us."""
        return await self._channel.wait_closed()

    async def publish(self, message: Message, *, exchange: str, routing_key: str, mandatory: bool = False) -> None:
        """Publish and wait until the broker has taken the message over.

        Raises `PublishRefusedError` when it did not; `BrokerSilentError` when the broker has read the message and a
        queue does not confirm it (it has lost its leader), which concerns that queue alone; `BrokerUnavailableError`
        when the outcome is unknown, because the connection itself is silent or lost.
        """

        async def send(channel: Channel | GuardedChannel) -> None:
            try:
                await channel.publish(message, exchange=exchange, routing_key=routing_key, mandatory=mandatory)
            except BrokerSilentError as silence:
                # Is the queue silent or the whole connection? Only the second one concerns other messages.
                await self._ping()
                raise silence

        if exchange == "" and routing_key.startswith(DIRECT_REPLY_TO):
            await send(self._channel)  # no queue, and nothing that could be held up
        else:
            await self._destinations.publish(exchange, routing_key, send)

    async def _ping(self) -> None:
        """Raises `BrokerUnavailableError`, and no `BrokerSilentError`, when the connection itself is silent."""
        try:
            await self._channel.ping()
        except BrokerUnavailableError as error:
            raise BrokerUnavailableError("The publishing connection does not answer.") from error


async def publish_until_taken(publish: Callable[[], Awaitable[None]], *, clock: Clock, log: Logger) -> None:
    """Return once the broker has a request again that a probe got out of its queue; a deleted one takes none back.

    Without a confirm it may have it, or not: it is published again. Two copies are allowed, none is not.
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
            await clock.sleep(GIVE_BACK_RETRY.delay(failures))
