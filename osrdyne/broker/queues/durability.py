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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
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

    All keys that wait share the next turn of one pair of queues. A key that is new alone has a pair and a channel to
    itself, so that a declaration that hangs holds up no other key.
    """

    def __init__(self, names: PoolNames, spare_channels: ChannelPool, *, term: Callable[[], int], clock: Clock) -> None:
        """`term`: the number of this term, once the token is held."""
        self._names = names
        self._term = term
        self._spare_channels = spare_channels
        self._clock = clock
        # Names with the term in them: two leaders must never use one short-lived queue (broker:
        # one-connection-per-name).
        self._shared = _QueuesInTurn(lambda: names.register_queues(term())[:2], spare_channels, clock=clock)
        self._single = _QueuesInTurn(lambda: names.register_queues(term())[2:], spare_channels, clock=clock)
        self._under_way = 0
        self._last = _BEFORE
        self._written = 0
        self._declared: dict[Key, int] = {}

    def note(self, key: Key) -> None:
        """A queue of this key may be new."""
        self._last += 1
        # A later number is written down later: `written` waits for at least this one.
        self._declared[key] = self._last

    def note_deleted(self, key: Key) -> None:
        """A queue of this key is deleted; if it has others, they are asked for anew."""
        self._last += 1
        self._declared.pop(key, None)

    async def written(self, key: Key) -> None:
        """Return once the queues of this key are written down. An earlier leader may have made them a moment ago."""
        if key not in self._declared:
            # Not declared in this term: it counts as new now, because an earlier leader may have been killed right
            # after it.
            self.note(key)
        await self._until(self._declared[key])

    async def write(self) -> None:
        """Return once every queue that was declared before this call is written down."""
        self._last += 1
        await self._until(self._last)

    async def _until(self, number: int) -> None:
        while self._written < number:
            async with self._shared.turn() as channel:
                # Asked again with the turn taken: the turn of another key may have covered this number.
                if self._written < number:
                    await self._shared.delete_last(channel)
                    await self._write(self._shared, channel)

    async def _write(self, queues: _QueuesInTurn, channel: Channel) -> None:
        noted = self._last  # before the declaration is sent: what comes later may have come too late for it
        # Its answer shows that the node has written down everything that it declared before.
        await queues.declare_next(channel)
        self._written = max(self._written, noted)

    @property
    def is_idle(self) -> bool:
        """Whether no queue is being declared, none is being written down, and `declare` can begin at once."""
        return self._single.is_ready and not self._under_way and not self._shared.is_taken

    @contextmanager
    def declaring(self) -> Iterator[None]:
        """Declare a queue inside, over another channel; it is written down by a later call."""
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    async def declare(self, key: Key, queue: QueueName, arguments: Mapping[str, object]) -> None:
        """Declare a queue of this key, and return once it is written down.

        RabbitMQ carries out the commands of a channel in order: the queue that comes and goes starts after this one,
        and nothing is waited for in between. Raises what a declaration of either of the two raises.
        """
        async with self._single.turn() as channel:
            await self._single.delete_last(channel)
            # Crash before: there is no queue. After: an empty, unbound one is left, which the next leader finds.
            await channel.begin_declare_queue(queue, arguments=arguments)
            # Before `_write` reads the number: this queue is covered by the turn that follows.
            self.note(key)
            await self._write(self._single, channel)

    async def run(self) -> None:
        """Prepare the first turns, and delete queues that have come, while the term lasts."""
        await self._shared.prepare()  # the queues that this term finds wait for it
        await self._single.prepare()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._shared.run(), name="shared durability queues")
            group.create_task(self._single.run(), name="durability queues of a single key")

    async def tidy(self) -> None:
        """Delete what the leader before this one has left, when RabbitMQ does nothing for that one any more."""
        await self._clock.sleep(TIDY_AFTER)
        # A channel of its own: a failed deletion closes it and costs nothing else.
        channel = await self._spare_channels.take()
        for queue in self._names.register_queues(self._term() + 1):
            await channel.delete_queue(queue)
        await channel.close()


class _QueuesInTurn:
    """Two queues that come and go in turn, over one channel.

    A name that was deleted a moment ago makes the node write nothing when it is declared again. So the one is deleted
    before the other is declared; the first time both come, because it is not known which one an earlier leader had
    last.
    """

    def __init__(self, names: Callable[[], Sequence[QueueName]], spare_channels: ChannelPool, *, clock: Clock) -> None:
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
        """The channel, for one turn: `delete_last`, then `declare_next`."""
        async with self._turn, self._open() as channel:
            yield channel

    async def delete_last(self, channel: Channel) -> None:
        """Delete the queue of the last turn: the channel carries out what it is asked next when this is done."""
        # Cleared first: after an error it must not be deleted a second time on the next channel.
        queue, self._present = self._present, None
        if queue is not None:
            await channel.begin_delete_queue(queue)

    async def declare_next(self, channel: Channel) -> None:
        """Declare the next queue. It starts when everything before it on this channel is carried out."""
        queue = next(self._in_turn)
        await channel.declare_queue(queue, arguments=_ARGUMENTS)
        self._present = queue
        self._changed.set()

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Channel]:
        """The channel, ready for the next queue. After an error it is closed: what it holds is unknown."""
        # Taken out while it is in use: `is_ready` must be false within a turn.
        channel, self._channel = self._channel, None
        is_new = channel is None or channel.is_closed
        if channel is None or channel.is_closed:
            channel = await self._spare_channels.take()
        try:
            if is_new:
                await self._begin(channel)
            is_new = False
            yield channel
        except BaseException:
            # A command may be half done; a closed channel is replaced, and `_begin` deletes what it left.
            await channel.close()
            if not is_new:
                self._changed.set()  # `run` opens another one
            raise
        self._channel = channel

    async def _begin(self, channel: Channel) -> None:
        """Delete what a killed daemon, or a channel that broke, has left: it would not be declared anew."""
        self._present = None
        queues = self._names()
        for queue in queues:
            await channel.delete_queue(queue)
        # Two names in turn: declaring the one that was just deleted would make the node write nothing.
        self._in_turn = cycle(queues)
        queue = next(self._in_turn)
        # Declared and deleted once: the first real turn then begins with the other name, at once.
        await channel.declare_queue(queue, arguments=_ARGUMENTS)
        await channel.begin_delete_queue(queue)

    async def prepare(self) -> None:
        """Begin before the first key waits: otherwise it would wait for four more commands."""
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
