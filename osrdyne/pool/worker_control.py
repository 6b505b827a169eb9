"""What the leader tells workers: control messages to the workers of a group. Used by the term and the worker watch."""

from __future__ import annotations

from collections.abc import Sequence

from osrdyne.amqp import Message
from osrdyne.pool.roles import Publisher
from osrdyne.pool.tracker import PoolStateTracker
from osrdyne.protocol.control import Command, ControlMessage
from osrdyne.protocol.names import Key, PoolNames, QueueName


class WorkerControl:
    """Publishes control messages; they may get lost."""

    def __init__(self, *, names: PoolNames, tracker: PoolStateTracker, publisher: Publisher) -> None:
        self._names = names
        self._tracker = tracker
        self._publisher = publisher

    async def ask_for_reports(self, key: Key) -> None:
        """Ask the workers of a group what state they are in (`resume` is answered with a report)."""
        await self._tell(key, ControlMessage(Command.RESUME, self._tracker.generation))

    async def tell_queues(self, key: Key, queues: Sequence[QueueName]) -> None:
        """Tell the workers of a group which queues they serve, the most urgent first."""
        await self._tell(key, ControlMessage(Command.QUEUES, self._tracker.generation, {"queues": list(queues)}))

    async def _tell(self, key: Key, message: ControlMessage) -> None:
        await self._publisher.publish(
            Message(body=message.wire_body(), persistent=False),
            exchange=self._names.control_exchange,
            routing_key=self._names.control_group_routing_key(key),
        )
