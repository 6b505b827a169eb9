"""Makes RabbitMQ write down where new quorum queues keep their logs, before anything is confirmed in them.

A node notes that in a table which it writes with a delay of about a second. Killed before, it comes back with the
queue and without its messages (4.3), or with a queue that has no leader (3.10): `tests/chaos/fresh_queues.py` shows it
without osrdyne. Declaring another quorum queue makes the node write what it has noted so far. Used by the request queue
commands before a new queue is bound.
"""

from __future__ import annotations

import asyncio

from osrdyne.amqp import Channel
from osrdyne.broker.scratch import ScratchChannels
from osrdyne.protocol.names import PoolNames

_ARGUMENTS = {"x-queue-type": "quorum"}


class QueueRegister:
    """One queue that comes and goes. Whoever calls meanwhile shares the next time.

    It goes while nobody waits for it, over a channel of its own, where the next declaration comes after that.
    """

    def __init__(self, names: PoolNames, scratch: ScratchChannels) -> None:
        self._queue = names.register_queue
        self._scratch = scratch
        self._channel: Channel | None = None
        self._turn = asyncio.Lock()
        self._asked = 0
        self._written = 0

    async def write(self) -> None:
        """Return once every queue that was declared before this call is written down."""
        self._asked += 1
        mine = self._asked
        async with self._turn:
            if self._written >= mine:
                return
            covers = self._asked
            await self._come_and_go()
            self._written = covers

    async def _come_and_go(self) -> None:
        channel, self._channel = self._channel, None
        if channel is None or channel.is_closed:
            channel = await self._scratch.take()
            # What a killed daemon, or a channel that broke, has left would not be declared anew.
            await channel.delete_queue(self._queue)
        try:
            await channel.declare_queue(self._queue, arguments=_ARGUMENTS)
            await channel.begin_delete_queue(self._queue)
        except BaseException:  # also where it was cancelled half-way: nobody knows what it holds
            await channel.close()
            raise
        self._channel = channel
