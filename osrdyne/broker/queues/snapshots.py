"""The queue that holds the latest snapshot of a subsystem's state, for a restart and for the next leader.

A queue of length 1: a new snapshot replaces the previous one, and RabbitMQ replicates it. Each term has a queue of its
own, so that a late publish of a leader that has lost the token replaces no snapshot of its successor (decision 0077). A
term deletes the queues of earlier terms when its own queue holds a snapshot; until then the next leader reads the
earlier one. Used by `pool.state.snapshots`.
"""

from __future__ import annotations

import re

from osrdyne.aio.clock import Clock
from osrdyne.amqp import Delivery, Message
from osrdyne.broker.leadership.channel_pool import LeaderChannels
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.queues.durability import QueueDurability
from osrdyne.broker.topology.declarations import NEVER
from osrdyne.errors import PublishRefusedError
from osrdyne.logs import Logger, get_logger
from osrdyne.protocol.names import PoolNames, QueueName

_TERM = re.compile(r"[0-9]{1,16}\Z", re.ASCII)
# How many messages of a queue are read at most: one that another program declared may hold any number.
_MAX_MESSAGES = 10
_ARGUMENTS = {
    "x-queue-type": "quorum",
    "x-max-length": 1,
    "x-overflow": "drop-head",
    # Each leader that reads a snapshot returns it.
    "x-delivery-limit": NEVER,
}


class SnapshotQueue:
    """The snapshots of one subsystem in one term. `name`: lower-case letters, part of the name of the queue."""

    def __init__(
        self,
        name: str,
        *,
        names: PoolNames,
        channels: LeaderChannels,
        durability: QueueDurability,
        management: ManagementClient,
        clock: Clock,
    ) -> None:
        self.name = name
        self._names = names
        self._token = channels.token
        self._spare_channels = channels.spare
        self._publisher = channels.publisher
        self._durability = durability
        self._management = management
        self._clock = clock
        self._stored = False  # Whether the queue of this term holds a snapshot.
        self._log: Logger = get_logger("snapshots", pool=names.pool, snapshot=name)

    async def read(self) -> bytes | None:
        """Return the last snapshot of an earlier term, which stays in its queue; None if there is none."""
        for queue in await self._earlier_queues():
            if (content := await self._read_queue(queue)) is not None:
                return content
            # That term ended before it stored one, or another program has replaced it: the term before it may have
            # stored one.
        return None

    async def _read_queue(self, queue: QueueName) -> bytes | None:
        """Return the snapshot in a queue; None if no message in it is from a leader."""
        # A channel of its own: closing it returns the messages.
        channel = await self._spare_channels.take()
        try:
            for _ in range(_MAX_MESSAGES):
                delivery = await channel.get(queue)
                if delivery is None:
                    return None
                if self._is_own(delivery):
                    return delivery.body
                self._log.warning("message in a snapshot queue is not from a leader, ignoring it", queue=queue)
            return None
        finally:
            await channel.close()

    async def write(self, content: bytes) -> None:
        """Replace the snapshot. Raises `LeadershipLostError` if this leader's term is over.

        A leader that gets the token after this has returned reads this snapshot or a later one.
        """
        if not self._stored:
            await self._declare()
        try:
            await self._publish(content)
        except PublishRefusedError:
            # The queue was deleted, by a later leader or by an operator.
            await self._confirm()
            await self._declare()
            await self._publish(content)
        # Crash before: the next leader reads this snapshot, or the one before. After the answer, only this one.
        await self._confirm()

    async def _confirm(self) -> None:
        """Raise `LeadershipLostError` unless this daemon still leads after everything that was sent before."""
        await self._token.confirm(since=self._clock.monotonic())

    async def _declare(self) -> None:
        async with self._spare_channels.borrow() as channel:
            await channel.declare_queue(self._queue, arguments=_ARGUMENTS)
        await self._durability.persist()

    async def _publish(self, content: bytes) -> None:
        message = Message(body=content, user_id=self._token.user)
        await self._publisher.publish(message, exchange="", routing_key=self._queue, mandatory=True)
        if not self._stored:
            # Only now: after a crash before this line, the next leader reads the snapshot of the earlier term.
            for queue in await self._earlier_queues():
                async with self._spare_channels.borrow() as channel:
                    await channel.delete_queue(queue)
            self._stored = True

    @property
    def _queue(self) -> QueueName:
        return self._names.snapshot_queue(self.name, self._token.term)

    async def _earlier_queues(self) -> list[QueueName]:
        """The queues of earlier terms, the latest term first."""
        prefix = self._names.snapshot_queue_prefix(self.name)
        listed = await self._management.list_queues(prefix)
        terms = [int(digits) for one in listed if _TERM.match(digits := one.name.removeprefix(prefix))]
        earlier = sorted((term for term in terms if term < self._token.term), reverse=True)
        return [self._names.snapshot_queue(self.name, term) for term in earlier]

    def _is_own(self, delivery: Delivery) -> bool:
        """Whether a leader has published it. True if tokens carry no user: then RabbitMQ verifies nothing."""
        return self._token.user is None or delivery.properties.user_id == self._token.user
