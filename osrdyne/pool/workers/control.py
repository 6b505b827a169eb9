"""What the leader tells workers: control messages. Used by the term, the worker watch and the worker actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from osrdyne.amqp import Message
from osrdyne.errors import BrokerSilentError, PublishRefusedError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import Publisher
from osrdyne.pool.state.tracker import PoolStateTracker
from osrdyne.protocol.control import Command, ControlMessage
from osrdyne.protocol.names import Key, QueueName, WorkerId


class WorkerControl:
    """Publishes control messages; they may get lost. Each method says whether RabbitMQ has taken the message."""

    def __init__(self, context: TermContext, *, tracker: PoolStateTracker, publisher: Publisher) -> None:
        self._names = context.names
        self._tracker = tracker
        self._publisher = publisher
        self._log: Logger = get_logger("worker_control")

    async def ask_for_reports(self, key: Key) -> bool:
        """Ask the workers of a group what state they are in (`resume` is answered with a report)."""
        return await self._tell_group(key, ControlMessage(Command.RESUME, self._tracker.generation))

    async def tell_queues(self, key: Key, queues: Sequence[QueueName]) -> bool:
        """Tell the workers of a group which queues they serve, the most urgent first."""
        return await self._tell_group(
            key, ControlMessage(Command.QUEUES, self._tracker.generation, {"queues": list(queues)})
        )

    async def tell_poison(self, key: Key, texts: Mapping[str, float]) -> bool:
        """Tell the workers of a group which texts they refuse, and for how many seconds."""
        message = ControlMessage(Command.POISON, self._tracker.generation, {"texts": dict(texts)})
        return await self._tell_group(key, message)

    async def drain(self, worker_id: WorkerId) -> bool:
        """Ask one worker to take nothing more, to finish what it runs, and to end."""
        message = ControlMessage(Command.DRAIN, self._tracker.generation)
        return await self._tell(self._names.control_worker_routing_key(worker_id), message)

    async def _tell_group(self, key: Key, message: ControlMessage) -> bool:
        return await self._tell(self._names.control_group_routing_key(key), message)

    async def _tell(self, routing_key: str, message: ControlMessage) -> bool:
        body, exchange = message.wire_body(), self._names.control_exchange
        try:
            # Waits as long as RabbitMQ blocks publishers: nobody could answer meanwhile.
            await self._publisher.publish(
                Message(body=body, persistent=False), exchange=exchange, routing_key=routing_key
            )
        except (PublishRefusedError, BrokerSilentError) as error:
            self._log.warning(
                "control message not taken", command=message.command.value, to=routing_key, error=str(error)
            )
            return False
        return True
