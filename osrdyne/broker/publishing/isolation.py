"""Keeps a queue that confirms nothing from holding up what is published to others. Used by the leader's publisher.

A channel is held up whole in two cases (measured on 3.10.8; docs/reference/failure-modes/broker.md):

- The first message of a channel for a quorum queue has RabbitMQ ask the leader of the queue. When there is none, all
  that comes behind it on this channel waits for 65 s, and then that message is refused.
- With 32 unconfirmed messages for one queue, RabbitMQ soon reads nothing more from the whole connection.

So a message for a destination that has confirmed nothing for a moment is tried alone, on a channel of its own, and
those behind it wait. A destination that has just confirmed shares one channel with all others, up to `MAX_UNCONFIRMED`
messages at once. What goes to one destination leaves in the order in which it came. It keeps no message: the caller
has the message until it is confirmed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from osrdyne.aio.clock import Clock
from osrdyne.aio.signals import Wakeup
from osrdyne.amqp import Channel, Connection
from osrdyne.amqp.direct_reply_to import GuardedChannel
from osrdyne.errors import BrokerSilentError, BrokerUnavailableError, MessageTooLargeError, PublishRefusedError

Send = Callable[[Channel | GuardedChannel], Awaitable[None]]
MAX_UNCONFIRMED = 24  # Messages for one destination on the shared channel; RabbitMQ counts to 32, by default.
# Seconds for which a confirm shows that a queue has its leader. One that loses it meanwhile, and to which the shared
# channel has published nothing before, can still hold that up; then the term ends.
FRESH = 1.0
# Channels for isolated publishes; fewer where RabbitMQ allows less than twice as many on a connection (by default
# 2,047).
MAX_ISOLATED = 500
PLACE_TIMEOUT = 30.0  # Seconds to wait for a channel when queues without a leader hold all of them up.
SPARE = 16  # Channels that stay open for later isolated publishes.
FORGET_AFTER = 60.0  # Seconds without a publish after which nothing is known of a destination any more.


class Destinations:
    """What is published to, each with what is known of its confirms."""

    def __init__(self, shared: Channel | GuardedChannel, connection: Connection, *, clock: Clock) -> None:
        self._shared = shared
        self._channels = IsolationChannels(connection)
        self._clock = clock
        self._destinations: dict[tuple[str, str], _Destination] = {}
        self._lost = Wakeup(clock)

    async def publish(self, exchange: str, routing_key: str, send: Send) -> None:
        """Publish with `send`, on the channel that it is given. Raises what that raises, and `BrokerSilentError` for
        a message that was not sent because one before it was not confirmed."""
        name = (exchange, routing_key)
        destination = self._destinations.get(name)
        if destination is None:
            destination = self._destinations[name] = _Destination()
        # Read before the turn is waited for: a silence that comes meanwhile concerns this message too.
        silences = destination.silences
        destination.users += 1
        try:
            async with destination.turn:
                destination.check(silences)
                # Not known to confirm: it goes alone, on a channel that only this destination can hold up.
                if not destination.may_share(self._clock.monotonic()):
                    await self._publish_isolated(destination, silences, send)
                    return
                # Within the turn, so that messages to one destination leave in the order of the calls.
                await destination.room.acquire()
            await self._publish_shared(destination, silences, send)
        finally:
            # Forgotten only without users: a message under way would otherwise miss a silence.
            destination.users -= 1
            destination.used_at = self._clock.monotonic()

    async def _publish_isolated(self, destination: _Destination, silences: int, send: Send) -> None:
        """Alone, on a channel of its own. One that is held up is kept for the next try."""
        channel, destination.held_up = destination.held_up, None
        if channel is None:
            try:
                channel = await self._channels.take()
            except BrokerSilentError:
                destination.fell_silent(silences)
                # No channel was free, so that nothing was sent: the caller retries as after a missing confirm.
                raise
        is_done = False
        try:
            await send(channel)
            destination.confirmed_at = self._clock.monotonic()
            is_done = True
        except (PublishRefusedError, MessageTooLargeError):
            is_done = True
            raise
        except BrokerSilentError:
            destination.fell_silent(silences)
            raise
        finally:
            # RabbitMQ has closed it (an exchange is missing, say): `run` ends the term.
            if channel.is_closed:
                self._lost.set()
            elif is_done:
                self._channels.give_back(channel)
            else:
                # The confirm may still come on this channel, and until then nothing else may use it.
                destination.held_up = channel

    async def _publish_shared(self, destination: _Destination, silences: int, send: Send) -> None:
        # What is under way may still be confirmed: until then the destination goes on sharing the channel.
        destination.sharing += 1
        try:
            # Asked again: a silence may have come while this message waited for room on the shared channel.
            destination.check(silences)
            await send(self._shared)
            destination.confirmed_at = self._clock.monotonic()
        except BrokerSilentError:
            destination.fell_silent(silences)
            raise
        finally:
            destination.sharing -= 1
            destination.room.release()

    async def run(self) -> None:
        """Forget what is not published to any more, and close the unused channels. Raises
        `BrokerUnavailableError` when one was closed by RabbitMQ: an exchange is missing, say."""
        while not await self._lost.wait(FORGET_AFTER):
            # Bounded memory: every reply queue is a destination, and clients come and go.
            idle = self._forget_idle(self._clock.monotonic() - FORGET_AFTER)
            held_up = [destination.held_up for destination in idle if destination.held_up is not None]
            await asyncio.gather(*map(self._channels.discard, held_up), self._channels.trim())
        raise BrokerUnavailableError("A publishing channel was lost.")

    def _forget_idle(self, used_before: float) -> list[_Destination]:
        idle = {
            name: destination
            for name, destination in self._destinations.items()
            if not destination.users and destination.used_at <= used_before
        }
        for name in idle:
            del self._destinations[name]
        return list(idle.values())


class _Destination:
    """One exchange and routing key. `sharing`: messages on the shared channel. `silences`: how often no confirm came.
    `held_up`: the channel of the last isolated publish, if that was not confirmed."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.room = asyncio.Semaphore(MAX_UNCONFIRMED)
        self.users = 0
        self.used_at = -math.inf
        self.sharing = 0
        self.silences = 0
        self.confirmed_at: float | None = None
        self.held_up: Channel | None = None

    def may_share(self, now: float) -> bool:
        """Whether it has just confirmed; or may be about to, for what it was sent lately on the shared channel."""
        return self.confirmed_at is not None and (self.sharing > 0 or now - self.confirmed_at <= FRESH)

    def fell_silent(self, silences: int) -> None:
        """A message that began after so many silences was not confirmed, or not sent for such a reason."""
        if self.silences == silences:
            self.silences += 1
            self.confirmed_at = None

    def check(self, silences: int) -> None:
        """Raises `BrokerSilentError` when one was left without a confirm meanwhile: that one goes first next time."""
        if self.silences != silences:
            raise BrokerSilentError("The message was not sent: RabbitMQ has not confirmed an earlier one.")


class IsolationChannels:
    """Channels of one connection, with confirms, each for one message at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # At most half of what RabbitMQ allows: it ends a connection that opens one channel too many.
        self._room = asyncio.Semaphore(min(MAX_ISOLATED, max(1, connection.max_channels // 2)))
        self._free: list[Channel] = []

    async def take(self) -> Channel:
        """A channel on which nothing is under way. Raises `BrokerSilentError` when there is none in time."""
        try:
            async with asyncio.timeout(PLACE_TIMEOUT):
                await self._room.acquire()
        except TimeoutError:
            raise BrokerSilentError("Too many queues have no leader: no channel is left to try another one.") from None
        try:
            return self._free.pop() if self._free else await self._open()
        except BaseException:
            self._room.release()
            raise

    async def _open(self) -> Channel:
        """While an alarm blocks the connection nothing is read from it, and no time-out counts."""
        while True:
            await self._connection.wait_unblocked()
            try:
                return await self._connection.channel(confirms=True)
            except BrokerSilentError as error:
                if not self._connection.is_blocked:
                    raise BrokerUnavailableError("The publishing connection does not answer.") from error

    def give_back(self, channel: Channel) -> None:
        self._free.append(channel)
        self._room.release()

    async def discard(self, channel: Channel) -> None:
        """Close one that may still be held up."""
        await channel.close()
        self._room.release()

    async def trim(self) -> None:
        """Close all but a few of the unused channels."""
        surplus, self._free = self._free[SPARE:], self._free[:SPARE]
        for channel in surplus:
            await channel.close()
