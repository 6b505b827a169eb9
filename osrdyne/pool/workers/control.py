"""Control messages from the leader to workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from osrdyne.amqp import Message
from osrdyne.errors import BrokerSilentError, PublishRefusedError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import Publisher
from osrdyne.pool.state.groups.paused_groups import PausedGroups
from osrdyne.pool.state.groups.tracker import PoolStateTracker
from osrdyne.protocol.control import Command, ControlMessage
from osrdyne.protocol.names import Key, QueueName, WorkerId
from osrdyne.protocol.pooled import Question, question_to_control
from osrdyne.protocol.rates import RATE_FIELD, EventRate


class WorkerControl:
    """Publishes control messages, which may get lost. Each method returns whether RabbitMQ has accepted the message."""

    def __init__(
        self, context: TermContext, *, tracker: PoolStateTracker, paused: PausedGroups, publisher: Publisher
    ) -> None:
        self._names = context.names
        self._tracker = tracker
        self._paused = paused
        self._publisher = publisher
        self._log: Logger = get_logger("worker_control")

    async def ask_for_reports(self, key: Key) -> bool:
        """Send the workers of a group `pause` or `resume`, as the group is; they answer with a report."""
        command = Command.PAUSE if self._paused.is_paused(key) else Command.RESUME
        return await self._send_to_group(key, ControlMessage(command, self._tracker.generation))

    async def ask_for_probe(self, worker_id: WorkerId, probe_id: str) -> bool:
        """Ask one paused worker to take exactly one request; its report repeats the id. False if the worker certainly
        did not receive the message, so that it may be sent again."""
        message = ControlMessage(Command.PROBE, self._tracker.generation, {"id": probe_id})
        routing_key = self._names.control_worker_routing_key(worker_id)
        try:
            # Mandatory: a new worker may report that it is ready before its control queue is bound.
            await self._publisher.publish(
                Message(body=message.wire_body(), persistent=False),
                exchange=self._names.control_exchange,
                routing_key=routing_key,
                mandatory=True,
            )
        except PublishRefusedError:
            return False
        except BrokerSilentError as error:
            self._log.warning("probe not confirmed", to=routing_key, error=str(error))
        return True

    async def send_queues(self, key: Key, queues: Sequence[QueueName]) -> bool:
        """Send the workers of a group the queues that they serve, the most urgent first."""
        return await self._send_to_group(
            key, ControlMessage(Command.QUEUES, self._tracker.generation, {"queues": list(queues)})
        )

    async def send_refused_texts(self, key: Key, texts: Mapping[str, float]) -> bool:
        """Send the workers of a group the texts that they refuse, with the seconds for which they do."""
        message = ControlMessage(Command.POISON, self._tracker.generation, {"texts": dict(texts)})
        return await self._send_to_group(key, message)

    async def send_rate(self, key: Key, rate: EventRate | None) -> bool:
        """Send the workers of a group the rate of each of them; None: no limit. They answer with a report."""
        details = {RATE_FIELD: None if rate is None else rate.to_wire()}
        return await self._send_to_group(key, ControlMessage(Command.RATE, self._tracker.generation, details))

    async def ask_for_reload(self, key: Key, reload_id: str) -> bool:
        """Ask the workers of a group to load their data again. They report the outcome; a repeated id repeats only the
        report."""
        return await self._send_to_group(
            key, ControlMessage(Command.RELOAD, self._tracker.generation, {"id": reload_id})
        )

    async def ask_to_reconnect(self, key: Key) -> bool:
        """Ask the workers of a group to connect anew as soon as they run no request."""
        return await self._send_to_group(key, ControlMessage(Command.RECONNECT, self._tracker.generation))

    async def ask_worker_to_reconnect(self, worker_id: WorkerId) -> bool:
        """As `ask_to_reconnect`, for one worker."""
        message = ControlMessage(Command.RECONNECT, self._tracker.generation)
        return await self._send(self._names.control_worker_routing_key(worker_id), message)

    async def drain(self, worker_id: WorkerId) -> bool:
        """Ask one worker to take no more requests, to finish those it runs, and to end."""
        message = ControlMessage(Command.DRAIN, self._tracker.generation)
        return await self._send(self._names.control_worker_routing_key(worker_id), message)

    async def ask_process(self, process: WorkerId, question: Question) -> bool:
        """Ask a pooled process. `Assign` contains the AMQP URI of a worker: the message is not persistent, and only the
        process reads the queue that it goes to."""
        message = question_to_control(question, self._tracker.generation)
        return await self._send(self._names.control_worker_routing_key(process), message)

    async def _send_to_group(self, key: Key, message: ControlMessage) -> bool:
        return await self._send(self._names.control_group_routing_key(key), message)

    async def _send(self, routing_key: str, message: ControlMessage) -> bool:
        body, exchange = message.wire_body(), self._names.control_exchange
        try:
            # Waits while RabbitMQ blocks publishers; workers could not answer meanwhile either.
            await self._publisher.publish(
                Message(body=body, persistent=False), exchange=exchange, routing_key=routing_key
            )
        except (PublishRefusedError, BrokerSilentError) as error:
            self._log.warning(
                "control message not accepted", command=message.command.value, to=routing_key, error=str(error)
            )
            return False
        return True
