"""Makes RabbitMQ write down where new quorum queues keep their logs, before anything is confirmed in them.

A node notes that in a table which it writes with a delay of about a second. Killed before, it comes back with the
queue and without its messages (4.3), or with a queue that has no leader (3.10): `tests/chaos/fresh_queues.py` shows it
without osrdyne. When the next quorum queue starts, the node writes what it has noted so far (decision 0020). Where no
request queue is about to be declared, a queue that comes and goes is. Used by the commands on queues of a pool that
hold requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from osrdyne.amqp import Channel
from osrdyne.broker.scratch import ScratchChannels
from osrdyne.protocol.names import Key, PoolNames, QueueName

_ARGUMENTS = {"x-queue-type": "quorum"}


class QueueRegister:
    """Numbers the queues that may be new, and knows up to which number they are written down.

    The queue of its own goes over a channel of its own, while nobody waits for it; its next declaration comes after.
    """

    def __init__(self, names: PoolNames, scratch: ScratchChannels) -> None:
        self._queue = names.register_queue
        self._scratch = scratch
        self._channel: Channel | None = None
        self._turn = asyncio.Lock()
        self._numbers: dict[Key, int] = {}
        self._last = 0
        self._written = 0
        self._expected = 0
        self._progress = asyncio.Event()

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """A request queue is about to be declared: who waits for `written` waits for that, and declares nothing."""
        self._expected += 1
        try:
            yield
        finally:
            self._expected -= 1
            self._wake()

    async def declare(self, channel: Channel, *, key: Key, queue: QueueName, arguments: Mapping[str, object]) -> None:
        """Declare a new request queue, and have those that were noted before written down by that."""
        noted = self._last
        await channel.declare_queue(queue, arguments=arguments)
        self.note(key)
        self._advance(noted)

    def note(self, key: Key) -> None:
        """A queue of this key may be new."""
        self._last += 1
        self._numbers[key] = self._last

    def forget(self, key: Key) -> None:
        """Its queues are deleted."""
        self._numbers.pop(key, None)

    async def written(self, key: Key) -> None:
        """Return once the queues of this key are written down. An earlier leader may have made them a moment ago."""
        if key not in self._numbers:
            self.note(key)
        await self._until(self._numbers[key])

    async def write(self) -> None:
        """Return once every queue that was declared before this call is written down."""
        self._last += 1
        await self._until(self._last)

    async def _until(self, number: int) -> None:
        while self._written < number:
            if self._expected:
                await self._progress.wait()
            else:
                await self._take_turn(number)

    async def _take_turn(self, number: int) -> None:
        async with self._turn:
            if self._written < number:
                await self._come_and_go()

    async def _come_and_go(self) -> None:
        channel, self._channel = self._channel, None
        if channel is None or channel.is_closed:
            channel = await self._scratch.take()
            # What a killed daemon, or a channel that broke, has left would not be declared anew.
            await channel.delete_queue(self._queue)
        noted = self._last
        try:
            await channel.declare_queue(self._queue, arguments=_ARGUMENTS)
            self._advance(noted)
            await channel.begin_delete_queue(self._queue)
        except BaseException:  # also where it was cancelled half-way: nobody knows what it holds
            await channel.close()
            raise
        self._channel = channel

    def _advance(self, noted: int) -> None:
        self._written = max(self._written, noted)
        self._wake()

    def _wake(self) -> None:
        """Whoever waits looks again."""
        self._progress.set()
        self._progress = asyncio.Event()
