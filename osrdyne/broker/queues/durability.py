"""Makes RabbitMQ persist where new quorum queues keep their logs, before anything is confirmed in them.

A node notes that in a table which it writes to disk with a delay of about a second. If the node is killed before, it
comes back with the queue and without its messages (4.3), or with a queue that has no leader (3.10):
`tests/chaos/fresh_queues.py` shows it without osrdyne. A queue that starts is looked up in that table, and a name that
the table has not seen lately makes the node write everything noted so far (decision 0020). So a short-lived queue, the
durability queue, is declared after new request queues: the answer to the declaration of a request queue does not say
whether that queue is new (decision 0039). Used by the commands on queues of a pool that hold requests.

RabbitMQ 3.10 closes a connection (541) that declares a quorum queue while another connection deletes or declares the
queue of that name (broker: one-connection-per-name). It may still execute commands of the previous leader, so each term
uses other names than the term before (decision 0045).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import cycle

from osrdyne.aio.clock import Clock
from osrdyne.aio.signals import Wakeup
from osrdyne.amqp import Channel
from osrdyne.broker.leadership.channel_pool import ChannelPool
from osrdyne.errors import BrokerConflictError, BrokerError
from osrdyne.logs import Logger, get_logger
from osrdyne.protocol.names import Key, PoolNames, QueueName

_ARGUMENTS = {"x-queue-type": "quorum"}
_BEFORE = 1  # The number of all changes before this term.
# Seconds after which a durability queue is deleted. Without this delay, RabbitMQ would execute the deletion before the
# bind that has waited for the declaration.
DELETE_AFTER = 0.05
# Seconds after which a new leader deletes the durability queues of the previous one. RabbitMQ has executed all commands
# of that leader by then.
TIDY_AFTER = 60.0


class QueueDurability:
    """Numbers the declarations and deletions of request queues, and records up to which number they are persisted.

    All keys that wait share the next declaration of one pair of durability queues. A key that is new while no other is
    being declared uses a pair and a channel of its own, so that a declaration that hangs delays no other key.
    """

    def __init__(self, names: PoolNames, spare_channels: ChannelPool, *, term: Callable[[], int], clock: Clock) -> None:
        """`term`: the number of this term, once the token is held."""
        self._names = names
        self._term = term
        self._spare_channels = spare_channels
        self._clock = clock
        # Names with the term in them: two leaders must never use one short-lived queue (broker:
        # one-connection-per-name).
        self._shared = _DurabilityQueues(lambda: names.register_queues(term())[:2], spare_channels, clock=clock)
        self._single = _DurabilityQueues(lambda: names.register_queues(term())[2:], spare_channels, clock=clock)
        self._declaring = 0
        self._last = _BEFORE
        self._persisted = 0
        self._declared: dict[Key, int] = {}
        self._log: Logger = get_logger("durability", pool=names.pool)

    def note(self, key: Key) -> None:
        """A queue of this key may be new."""
        self._last += 1
        self._declared[key] = self._last

    def note_deleted(self, key: Key) -> None:
        """A queue of this key is deleted; its other queues count as new from now on."""
        self._last += 1
        self._declared.pop(key, None)

    async def wait_persisted(self, key: Key) -> None:
        """Return once the queues of this key are persisted."""
        if key not in self._declared:
            # Not declared in this term, but an earlier leader may have declared them a moment ago.
            self.note(key)
        await self._until(self._declared[key])

    async def persist(self) -> None:
        """Return once all declarations and deletions before this call are persisted."""
        self._last += 1
        await self._until(self._last)

    async def _until(self, number: int) -> None:
        while self._persisted < number:
            async with self._shared.turn() as channel:
                # Checked again: the turn of another key may have covered this number.
                if self._persisted < number:
                    await self._shared.delete_last(channel)
                    await self._persist(self._shared, channel)

    async def _persist(self, queues: _DurabilityQueues, channel: Channel) -> None:
        noted = self._last  # read before the declaration is sent, which may not cover later ones
        # Its answer shows that the node has persisted all queues that were declared before.
        await queues.declare_next(channel)
        self._persisted = max(self._persisted, noted)

    @property
    def is_idle(self) -> bool:
        """Whether no queue is being declared or persisted, and `declare` can begin at once."""
        return self._single.is_ready and not self._declaring and not self._shared.is_taken

    @contextmanager
    def declaring(self) -> Iterator[None]:
        """Declare a queue inside, over another channel; a later call persists it."""
        self._declaring += 1
        try:
            yield
        finally:
            self._declaring -= 1

    async def declare(self, key: Key, queue: QueueName, arguments: Mapping[str, object]) -> None:
        """Declare a queue of this key, and return once it is persisted.

        RabbitMQ executes the commands of a channel in order, so the durability queue is declared right behind this one,
        with one wait for both. Raises what a declaration of either of the two raises.
        """
        async with self._single.turn() as channel:
            await self._single.delete_last(channel)
            # Crash before: there is no queue. After: an empty, unbound one is left, which the next leader finds.
            await channel.begin_declare_queue(queue, arguments=arguments)
            self.note(key)  # before `_persist` reads the number, so that this queue is covered
            await self._persist(self._single, channel)

    async def run(self) -> None:
        """Prepare the first turns, then delete durability queues after their use; never returns."""
        await self._shared.prepare()  # first: the binds of the queues that this term finds wait for it
        await self._single.prepare()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._shared.run(), name="shared durability queues")
            group.create_task(self._single.run(), name="durability queues of a single key")

    async def tidy(self) -> None:
        """Delete the durability queues of the previous leader, once RabbitMQ executes none of its commands any more."""
        await self._clock.sleep(TIDY_AFTER)
        # A channel of its own: a failed deletion closes it and has no other effect.
        channel = await self._spare_channels.take()
        try:
            for queue in self._names.register_queues(self._term() + 1):
                await channel.delete_queue(queue)
        except BrokerError as error:  # a later leader deletes them
            self._log.warning("durability queues of the previous leader not deleted", error=str(error))
        finally:
            await channel.close()


class _DurabilityQueues:
    """Two durability queues, declared in turn over one channel.

    Declaring a name that was deleted a moment ago makes the node write nothing. So one of the two is deleted before the
    other is declared.
    """

    def __init__(self, names: Callable[[], Sequence[QueueName]], spare_channels: ChannelPool, *, clock: Clock) -> None:
        """`names`: both names, once the token is held."""
        self._names = names
        # Empty until the first turn: the term, and with it the names, is not known before.
        self._in_turn: Iterator[QueueName] = iter(())
        self._spare_channels = spare_channels
        self._clock = clock
        self._channel: Channel | None = None
        self._present: QueueName | None = None
        self._changed = Wakeup(clock)
        self._turn = asyncio.Lock()

    @property
    def is_taken(self) -> bool:
        """Whether a turn is under way."""
        return self._turn.locked()

    @property
    def is_ready(self) -> bool:
        """Whether the next turn begins at once."""
        return not self._turn.locked() and self._channel is not None and not self._channel.is_closed

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Channel]:
        """Return the channel for one turn: `delete_last`, then `declare_next`."""
        async with self._turn, self._open() as channel:
            yield channel

    async def delete_last(self, channel: Channel) -> None:
        """Delete the queue of the last turn, without waiting for the answer."""
        # Cleared first: after an error it must not be deleted a second time on the next channel.
        queue, self._present = self._present, None
        if queue is not None:
            await channel.begin_delete_queue(queue)

    async def declare_next(self, channel: Channel) -> None:
        """Declare the next queue. RabbitMQ executes all commands before it on this channel first."""
        queue = next(self._in_turn)
        await channel.declare_queue(queue, arguments=_ARGUMENTS)
        self._present = queue
        self._changed.set()

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Channel]:
        """Return the channel, ready for the next declaration. After an error the channel is closed and replaced."""
        # Taken out while it is in use: `is_ready` must be false within a turn.
        channel, self._channel = self._channel, None
        begun = False
        try:
            if channel is None or channel.is_closed:
                channel = await self._spare_channels.take()
                await self._begin(channel)
            begun = True
            yield channel
        except BaseException:
            # A command may be half done. `_begin` on the next channel deletes what is left.
            if channel is not None:
                await channel.close()
            # `run` prepares another channel. Not if the preparation itself failed: the next key tries again.
            if begun:
                self._changed.set()
            raise
        self._channel = channel

    async def _begin(self, channel: Channel) -> None:
        """Delete the queues that a killed daemon, or a closed channel, has left: declaring them again would make the
        node write nothing."""
        self._present = None
        queues = self._names()
        for queue in queues:
            await channel.delete_queue(queue)
        self._in_turn = cycle(queues)
        queue = next(self._in_turn)
        # Declared and deleted once: the first real turn then begins with the other name, at once.
        await channel.declare_queue(queue, arguments=_ARGUMENTS)
        await channel.begin_delete_queue(queue)

    async def prepare(self) -> None:
        """Open the channel before the first key needs it, which would otherwise wait for four more commands."""
        with suppress(BrokerConflictError):  # the first new key reports it
            async with self.turn():
                pass

    async def run(self) -> None:
        """Delete the last queue a moment after it was declared; after an error, prepare the next turn."""
        while True:
            await self._changed.wait()
            await self._clock.sleep(DELETE_AFTER)
            with suppress(BrokerConflictError):  # the next new key reports it
                async with self.turn() as channel:
                    await self.delete_last(channel)
