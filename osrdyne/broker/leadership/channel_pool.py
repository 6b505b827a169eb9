"""Pools of open channels for commands that may fail, such as passive declarations: RabbitMQ closes the channel of a
refused command (lifecycle: token-channel-never-fails).

A channel whose command succeeded is used again. Closed ones are replaced ahead of time: the 404 at the start of every
new key then costs no round trip for another channel.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from osrdyne.amqp import Channel, Connection
from osrdyne.broker.leadership.token import TokenChannel
from osrdyne.broker.publishing.publisher import LeaderPublisher

SPARE = 4


class ChannelPool:
    """Up to `SPARE` open channels of one connection. `run` replaces those that are used up."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._spare: asyncio.Queue[Channel] = asyncio.Queue()
        # Counts the channels to open, not those in use: `take` and a closed channel each add one.
        self._missing = asyncio.Semaphore(SPARE)

    async def run(self) -> None:
        """Open channels as they are missing; never returns."""
        while True:
            await self._missing.acquire()
            self._spare.put_nowait(await self._connection.channel())

    async def take(self) -> Channel:
        """Return a channel that the caller closes; `run` opens another one."""
        channel = await self._spare.get()
        self._missing.release()
        return channel

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[Channel]:
        """Yield a channel for one command, which may close it."""
        channel = await self._spare.get()
        try:
            yield channel
        except BaseException:
            # Also after a cancellation: a command that is half done leaves its channel unusable.
            await channel.close()
            raise
        finally:
            if channel.is_closed:
                self._missing.release()
            else:
                self._spare.put_nowait(channel)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderChannels:
    """The channels of a leader by purpose.

    `token`: bind, unbind and delete, which a deposed leader must not do. `spare`: passive declarations and other short
    commands that may fail. `probing`: probes, which a silent queue stalls. `declaring`: declarations of unbound queues,
    of many keys at once. `publisher`: publishes with a confirm.
    """

    token: TokenChannel
    spare: ChannelPool
    probing: ChannelPool
    declaring: ChannelPool
    publisher: LeaderPublisher
