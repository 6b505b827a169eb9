"""Isolates queues that confirm nothing, so that they do not delay publishes to others. Used by the leader's publisher.

A queue without a Raft leader stalls a whole channel in two cases (measured on 3.10.8;
docs/reference/failure-modes/broker.md):

- For the first message of a channel to a quorum queue, RabbitMQ queries the leader of the queue. Without a leader, all
  later messages of the channel wait for 65 s; then RabbitMQ refuses the first one.
- With 32 unconfirmed messages for one queue, RabbitMQ soon stops reading from the whole connection.

So a message for a destination without a recent confirm is published alone, on a channel of its own, and later messages
for that destination wait. Destinations with a recent confirm share one channel, with up to `MAX_UNCONFIRMED` messages
of each in flight. Messages to one destination leave in the order of the calls. Nothing is stored here: the caller keeps
the message until it is confirmed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from osrdyne.aio.clock import Clock
from osrdyne.aio.signals import Wakeup
from osrdyne.amqp import Channel, Connection
from osrdyne.amqp.direct_reply_to import GuardedChannel
from osrdyne.errors import (
    BrokerAccessError,
    BrokerSilentError,
    BrokerUnavailableError,
    MessageTooLargeError,
    PublishRefusedError,
)

Send = Callable[[Channel | GuardedChannel], Awaitable[None]]
MAX_UNCONFIRMED = 24  # Messages for one destination on the shared channel; RabbitMQ's limit is 32 by default.
# Seconds for which a confirm shows that a queue has its leader. A queue that loses its leader within this time, and to
# which the shared channel has not published before, still stalls that channel; then the term ends.
FRESH = 1.0
# Channels for isolated publishes; fewer where RabbitMQ allows less than twice as many on a connection (by default
# 2,047).
MAX_ISOLATED = 500
PLACE_TIMEOUT = 30.0  # Seconds to wait for a channel when queues without a leader stall all of them.
SPARE = 16  # Channels that stay open for later isolated publishes.
FORGET_AFTER = 60.0  # Seconds without a publish after which a destination is forgotten.


class Destinations:
    """The destinations of publishes, with the state of their confirms."""

    def __init__(
        self, shared: Callable[[str], Channel | GuardedChannel], connection: Connection, *, clock: Clock
    ) -> None:
        """`shared`: the channel that destinations of an exchange share."""
        self._shared = shared
        self._channels = IsolationChannels(connection)
        self._clock = clock
        self._destinations: dict[tuple[str, str], _Destination] = {}
        self._lost = Wakeup(clock)

    async def publish(self, exchange: str, routing_key: str, send: Send) -> None:
        """Call `send` with the channel for this destination. Raises what `send` raises, and `BrokerSilentError` for a
        message that was not sent because an earlier one was not confirmed."""
        name = (exchange, routing_key)
        destination = self._destinations.get(name)
        if destination is None:
            destination = self._destinations[name] = _Destination()
        # Read before the wait for the turn: a silence in the meantime concerns this message too.
        silences = destination.silences
        destination.users += 1
        try:
            async with destination.turn:
                destination.check(silences)
                # Without a recent confirm: alone, on a channel that only this destination can stall.
                if not destination.may_share(self._clock.monotonic()):
                    await self._publish_isolated(destination, silences, send)
                    return
                # Within the turn, so that messages to one destination leave in the order of the calls.
                await destination.room.acquire()
            await self._publish_shared(destination, silences, send, self._shared(exchange))
        finally:
            # `_forget_idle` keeps a destination with users: a message in flight must not miss a silence.
            destination.users -= 1
            destination.used_at = self._clock.monotonic()

    async def _publish_isolated(self, destination: _Destination, silences: int, send: Send) -> None:
        """Publish alone, on a channel of its own. A stalled channel is kept for the next attempt."""
        channel, destination.stalled = destination.stalled, None
        if channel is None:
            try:
                channel = await self._channels.take()
            except BrokerSilentError:
                destination.fell_silent(silences)
                raise  # nothing was sent; the caller retries as after a missing confirm
        is_done = is_refused = False
        try:
            await send(channel)
            destination.confirmed_at = self._clock.monotonic()
            is_done = True
        except (PublishRefusedError, MessageTooLargeError):
            is_done = True
            raise
        except BrokerAccessError:
            # RabbitMQ has closed this channel, on which nothing else was in flight. The caller decides what follows.
            is_refused = True
            raise
        except BrokerSilentError:
            destination.fell_silent(silences)
            raise
        finally:
            if is_refused:
                await self._channels.discard(channel)
            # RabbitMQ has closed it, for example because an exchange is missing: `run` ends the term.
            elif channel.is_closed:
                self._lost.set()
            elif is_done:
                self._channels.give_back(channel)
            else:
                # The confirm may still come on this channel; until then no other destination may use it.
                destination.stalled = channel

    async def _publish_shared(
        self, destination: _Destination, silences: int, send: Send, channel: Channel | GuardedChannel
    ) -> None:
        destination.sharing += 1
        try:
            # Checked again, after the wait for room on the shared channel.
            destination.check(silences)
            await send(channel)
            destination.confirmed_at = self._clock.monotonic()
        except BrokerAccessError:
            destination.confirmed_at = None  # the next refusal must not close the shared channel
            raise
        except BrokerSilentError:
            destination.fell_silent(silences)
            raise
        finally:
            destination.sharing -= 1
            destination.room.release()

    async def run(self) -> None:
        """Forget unused destinations and close unused channels. Raises `BrokerUnavailableError` when RabbitMQ has
        closed a channel."""
        while not await self._lost.wait(FORGET_AFTER):
            # Every reply queue of a client is a destination: without this their number would grow without limit.
            idle = self._forget_idle(self._clock.monotonic() - FORGET_AFTER)
            stalled = [destination.stalled for destination in idle if destination.stalled is not None]
            await asyncio.gather(*map(self._channels.discard, stalled), self._channels.trim())
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
    """One exchange and routing key. `sharing`: messages in flight on the shared channel. `silences`: how often no
    confirm came in time. `stalled`: the channel of the last isolated publish, if that was not confirmed."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.room = asyncio.Semaphore(MAX_UNCONFIRMED)
        self.users = 0
        self.used_at = -math.inf
        self.sharing = 0
        self.silences = 0
        self.confirmed_at: float | None = None
        self.stalled: Channel | None = None

    def may_share(self, now: float) -> bool:
        """Whether it has a recent confirm, or had one when the messages now on the shared channel were published."""
        return self.confirmed_at is not None and (self.sharing > 0 or now - self.confirmed_at <= FRESH)

    def fell_silent(self, silences: int) -> None:
        """Note that a message was not confirmed in time. `silences`: their number when its publish began. Messages that
        were in flight together count once."""
        if self.silences == silences:
            self.silences += 1
            self.confirmed_at = None

    def check(self, silences: int) -> None:
        """Raise `BrokerSilentError` if an earlier message was not confirmed meanwhile: it must be sent first again."""
        if self.silences != silences:
            raise BrokerSilentError("The message was not sent: RabbitMQ has not confirmed an earlier one.")


class IsolationChannels:
    """Channels of one connection, with confirms, each for one message at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # At most half of the limit: RabbitMQ closes a connection that opens one channel too many.
        self._room = asyncio.Semaphore(min(MAX_ISOLATED, max(1, connection.max_channels // 2)))
        self._free: list[Channel] = []

    async def take(self) -> Channel:
        """Return a channel with nothing in flight. Raises `BrokerSilentError` if none becomes free in time."""
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
        """Open a channel. While an alarm blocks the connection, no time-out counts: RabbitMQ reads nothing from it."""
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
        """Close a channel that may still be stalled."""
        await channel.close()
        self._room.release()

    async def trim(self) -> None:
        """Close all but a few of the unused channels."""
        surplus, self._free = self._free[SPARE:], self._free[:SPARE]
        for channel in surplus:
            await channel.close()
