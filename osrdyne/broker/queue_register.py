"""Makes RabbitMQ write down where new quorum queues keep their logs, before anything is confirmed in them.

A node notes that in a table which it writes with a delay of about a second. Killed before, it comes back with the
queue and without its messages (4.3), or with a queue that has no leader (3.10): `tests/chaos/fresh_queues.py` shows it
without osrdyne. A queue that starts is looked up in that table, and a name that the table has not heard of lately makes
the node write what it has noted so far (decision 0020). Where no request queue is about to be declared, a queue that
comes and goes is. Used by the commands on queues of a pool that hold requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle

from osrdyne.amqp import Channel
from osrdyne.broker.scratch import ScratchChannels
from osrdyne.protocol.names import Key, PoolNames, QueueName

_ARGUMENTS = {"x-queue-type": "quorum"}
_BEFORE = 1
"""The number of everything that happened before this term."""


class QueueRegister:
    """Numbers what happens to queues, and knows up to which number it is written down.

    A name that was deleted a moment ago makes the node write nothing when it is declared again. So the queues that
    come and go are two in turn, over one channel; the first time both come, because nobody knows which one an earlier
    leader had last. They go while nobody waits for them.
    """

    def __init__(self, names: PoolNames, scratch: ScratchChannels) -> None:
        self._queues = names.register_queues
        self._in_turn = cycle(self._queues)
        self._scratch = scratch
        self._channel: Channel | None = None
        self._turn = asyncio.Lock()
        self._last = _BEFORE
        self._written = 0
        self._declared: dict[Key, int] = {}
        self._deleted: dict[Key, int] = {}
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
        """Declare a new request queue; by that, those that were noted before are written down."""
        noted = self._last
        unheard_of = key not in self._declared and self._deleted.get(key, _BEFORE) <= self._written
        await channel.declare_queue(queue, arguments=arguments)
        self.note(key)
        if unheard_of:
            self._advance(noted)

    def note(self, key: Key) -> None:
        """A queue of this key may be new."""
        self._last += 1
        self._declared[key] = self._last

    def note_deleted(self, key: Key) -> None:
        """A queue of this key is deleted; if it has others, they are asked for anew."""
        self._last += 1
        self._deleted[key] = self._last
        self._declared.pop(key, None)

    async def written(self, key: Key) -> None:
        """Return once the queues of this key are written down. An earlier leader may have made them a moment ago."""
        if key not in self._declared:
            self.note(key)
        await self._until(self._declared[key])

    async def write(self) -> None:
        """Return once every queue that was declared before this call is written down."""
        self._last += 1
        await self._until(self._last)

    async def _until(self, number: int) -> None:
        while self._written < number:
            if self._expected and self._written:
                await self._progress.wait()
            else:
                await self._take_turn(number)

    async def _take_turn(self, number: int) -> None:
        async with self._turn:
            if self._written < number:
                await self._come_and_go()

    async def _come_and_go(self) -> None:
        channel, self._channel = self._channel, None
        is_new = channel is None or channel.is_closed
        if channel is None or channel.is_closed:
            channel = await self._scratch.take()
        try:
            if is_new:
                await self._begin(channel)
            noted = self._last
            queue = next(self._in_turn)
            await channel.declare_queue(queue, arguments=_ARGUMENTS)
            self._advance(noted)
            await channel.begin_delete_queue(queue)
        except BaseException:  # also where it was cancelled half-way: nobody knows what it holds
            await channel.close()
            raise
        self._channel = channel

    async def _begin(self, channel: Channel) -> None:
        """Delete what a killed daemon, or a channel that broke, has left: it would not be declared anew."""
        for queue in self._queues:
            await channel.delete_queue(queue)
        queue = next(self._in_turn)
        await channel.declare_queue(queue, arguments=_ARGUMENTS)
        await channel.begin_delete_queue(queue)

    def _advance(self, noted: int) -> None:
        self._written = max(self._written, noted)
        self._deleted = {key: number for key, number in self._deleted.items() if number > self._written}
        self._wake()

    def _wake(self) -> None:
        """Whoever waits looks again."""
        self._progress.set()
        self._progress = asyncio.Event()
