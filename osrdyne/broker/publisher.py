"""The leader's publisher: one channel with confirms, on a connection of its own (LIFECYCLE 3).

A publish can draw an error that kills its connection (541 on RabbitMQ 3.10), and an alarm blocks the connections that
publish: neither may touch the channel that holds the token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from osrdyne.aio.backoff import Backoff
from osrdyne.aio.clock import Clock
from osrdyne.amqp import Channel, Connection, Message
from osrdyne.amqp.direct_replies import GuardedChannel, guarded_channel
from osrdyne.errors import BrokerSilentError, BrokerUnavailableError, PublishRefusedError
from osrdyne.logs import Logger

GIVE_BACK_RETRY = Backoff(initial=0.5, maximum=10.0)


class LeaderPublisher:
    """Publishes with confirms; many publishes may be under way at once."""

    def __init__(self, channel: Channel | GuardedChannel) -> None:
        self._channel = channel

    @classmethod
    async def open(
        cls, connection: Connection, *, open_another: Callable[[], Awaitable[Connection]], clock: Clock
    ) -> LeaderPublisher:
        """`open_another`: a connection for answers that could end it."""
        return cls(await guarded_channel(connection, open_another, clock=clock))

    async def wait_closed(self) -> BaseException | None:
        """Wait until nothing can be published any more; the reason, or None when it was closed by us."""
        return await self._channel.wait_closed()

    async def publish(self, message: Message, *, exchange: str, routing_key: str, mandatory: bool = False) -> None:
        """Publish and wait until the broker has taken the message over.

        Raises `PublishRefusedError` when it did not; `BrokerSilentError` when the broker has read the message and a
        queue does not confirm it (it has lost its leader), which concerns that queue alone; `BrokerUnavailableError`
        when nobody knows, because the connection itself is silent or lost.
        """
        try:
            await self._channel.publish(message, exchange=exchange, routing_key=routing_key, mandatory=mandatory)
        except BrokerSilentError as silence:
            # The broker works on a channel in order: an answer to a later question means that it has routed this.
            try:
                await self._channel.ping()
            except BrokerUnavailableError as error:
                raise BrokerUnavailableError("The publishing connection does not answer.") from error
            raise silence


async def publish_until_taken(publish: Callable[[], Awaitable[None]], *, clock: Clock, log: Logger) -> None:
    """Return once the broker has a request again that a probe got out of its queue; a deleted one takes none back."""
    failures = 0
    while True:
        try:
            await publish()
            return
        except PublishRefusedError as error:
            failures += 1
            log.error("request of a probed queue is not taken, trying again", error=str(error))
            await clock.sleep(GIVE_BACK_RETRY.delay(failures))
