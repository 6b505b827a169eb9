"""Makes RabbitMQ write down where new quorum queues keep their logs, before anything is confirmed in them.

A node notes that in a table which it writes with a delay of about a second. Killed before, it comes back with the
queue and without its messages (4.3), or with a queue that has no leader (3.10): `tests/chaos/fresh_queues.py` shows it
without osrdyne. A queue that starts is looked up in that table, and a name that the table has not heard of lately makes
the node write what it has noted so far (decision 0020). So a queue that comes and goes is declared after new ones: the
answer to the declaration of a request queue does not say whether that queue is new (decision 0039). Used by the
commands on queues of a pool that hold requests.

RabbitMQ 3.10 ends a connection (541) that declares a quorum queue while another connection deletes or declares the
queue of that name (broker: one-connection-per-name). It may still carry out commands of the leader before, so that each
term has other names than the one before it (decision 0045).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import cycle

from osrdyne.aio.clock import Clock
from osrdyne.aio.signals import Wakeup
from osrdyne.amqp import Channel
from osrdyne.broker.leadership.channel_pool import ChannelPool
from osrdyne.errors import BrokerConflictError
from osrdyne.protocol.names import Key, PoolNames, QueueName

_ARGUMENTS = {"x-queue-type": "quorum"}
_BEFORE = 1  # The number of everything that happened before this term.
# Seconds that a queue which comes and goes stays. RabbitMQ deletes it while it has nothing else to do: at once, the
# deletion would come before the binding that has waited for it.
DELETE_AFTER = 0.05
# Seconds until a new leader deletes what the one before has left; RabbitMQ has carried out its commands by then.
TIDY_AFTER = 60.0


class QueueDurability:
    """Numbers what happens to queues, and knows up to which number it is written down.

    A name that was deleted a moment ago makes the node write nothing when it is declared again. So the queues that
    come and go are two in turn, over one channel, and the one is deleted before the other is declared; the first time
    both come, because it is not known which one an earlier leader had last. All keys that wait share the next turn.
    """

    def __init__(self, names: PoolNames, spare_channels: ChannelPool, *, term: Callable[[], int], clock: Clock) -> None:
        """`term`: the number of this term, once the token is held."""
        self._names = names
        self._term = term
        self._in_turn: Iterator[QueueName] = iter(())
        self._spare_channels = spare_channels
        self._clock = clock
        self._channel: Channel | None = None
        self._present: QueueName | None = None
        self._came = Wakeup(clock)
        self._turn = asyncio.Lock()
        self._last = _BEFORE
        self._written = 0
        self._declared: dict[Key, int] = {}

    def note(self, key: Key) -> None:
        """A queue of this key may be new."""
        self._last += 1
        self._declared[key] = self._last

    def note_deleted(self, key: Key) -> None:
        """A queue of this key is deleted; if it has others, they are asked for anew."""
        self._last += 1
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
            async with self._turn:
                if self._written < number:
                    await self._come_and_go()

    async def _come_and_go(self) -> None:
        async with self._open() as channel:
            await self._delete_present(channel)
            noted = self._last  # before the declaration is sent: what comes later may have come too late for it
            queue = next(self._in_turn)
            await channel.declare_queue(queue, arguments=_ARGUMENTS)
            self._written = max(self._written, noted)
            self._present = queue
            self._came.set()

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Channel]:
        """The channel, ready for the next queue. After an error it is closed: what it holds is unknown."""
        channel, self._channel = self._channel, None
        is_new = channel is None or channel.is_closed
        if channel is None or channel.is_closed:
            channel = await self._spare_channels.take()
        try:
            if is_new:
                await self._begin(channel)
            yield channel
        except BaseException:
            await channel.close()
            raise
        self._channel = channel

    async def _begin(self, channel: Channel) -> None:
        """Delete what a killed daemon, or a channel that broke, has left: it would not be declared anew."""
        self._present = None
        queues = self._names.register_queues(self._term())
        for queue in queues:
            await channel.delete_queue(queue)
        self._in_turn = cycle(queues)
        queue = next(self._in_turn)
        await channel.declare_queue(queue, arguments=_ARGUMENTS)
        await channel.begin_delete_queue(queue)

    async def _delete_present(self, channel: Channel) -> None:
        """The channel carries out what it is asked next when this is done."""
        queue, self._present = self._present, None
        if queue is not None:
            await channel.begin_delete_queue(queue)

    async def run(self) -> None:
        """Prepare the first turn; then delete the last queue a moment after it was declared, while the term lasts."""
        with suppress(BrokerConflictError):  # the first new key reports it
            async with self._turn, self._open():
                pass  # otherwise the first new key would wait for four more commands
        while True:
            await self._came.wait()
            await self._clock.sleep(DELETE_AFTER)
            async with self._turn, self._open() as channel:
                await self._delete_present(channel)

    async def tidy(self) -> None:
        """Delete what the leader before this one has left, when RabbitMQ does nothing for that one any more."""
        await self._clock.sleep(TIDY_AFTER)
        with suppress(BrokerConflictError):  # the first new key reports it
            async with self._turn, self._open() as channel:
                for queue in self._names.register_queues(self._term() + 1):
                    await channel.delete_queue(queue)
