"""Spare channels for questions that may fail: passive declares and probes close the channel they are asked on.

A channel that lived through its question is used again; the next question finds one open already, so that the 404 that
every new key begins with costs no round trip of its own (lifecycle: token-channel-never-fails).
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
    """A small stock of open channels of one connection. `run` keeps it filled."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._spare: asyncio.Queue[Channel] = asyncio.Queue()
        # Counts the channels to open, not those in use: `take` and a broken channel each make room for one more.
        self._missing = asyncio.Semaphore(SPARE)

    async def run(self) -> None:
        """Replace the channels that are used up; never returns."""
        while True:
            await self._missing.acquire()
            # Opened ahead: opening costs a round trip, which a new key would wait for.
            self._spare.put_nowait(await self._connection.channel())

    async def take(self) -> Channel:
        """A channel to keep; the stock is filled up again."""
        channel = await self._spare.get()
        self._missing.release()
        return channel

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[Channel]:
        """A channel to ask one question on; it may be closed by the answer."""
        channel = await self._spare.get()
        try:
            yield channel
        except BaseException:
            # Not only a 404: a question that was cancelled half-way leaves its channel unusable.
            await channel.close()
            raise
        finally:
            if channel.is_closed:
                self._missing.release()
            else:
                self._spare.put_nowait(channel)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderChannels:
    """`token`: bind, unbind and delete, which a deposed leader must not do. `spare`: questions that may fail, such as
    passive declarations. `probing`: probes, which a silent queue holds up. `declaring`: declarations of unbound
    queues, of many keys at once. `publisher`: everything that is published with a confirm."""

    token: TokenChannel
    spare: ChannelPool
    probing: ChannelPool
    declaring: ChannelPool
    publisher: LeaderPublisher
