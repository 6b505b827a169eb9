"""Takes exactly one request for a probe: the leader decides by its outcome whether a circuit may close.

The worker is paused, so no intake consumes. The report of the outcome repeats the id of the probe.
Source: docs/design/circuits.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from osrdyne.amqp import Channel
from osrdyne.errors import BrokerError
from osrdyne.logs import get_logger
from osrdyne.protocol.names import QueueName
from osrdyne_worker.requests.processor import Processor
from osrdyne_worker.runtime.connection import BrokerConnection

log = get_logger("worker")


class ProbeIntake:
    """Takes requests for probes on one connection, one at a time."""

    def __init__(self, broker: BrokerConnection, processor: Processor) -> None:
        self._broker = broker
        self._processor = processor
        # Kept open: RabbitMQ may forget acknowledgements on a channel that is closed right after them.
        self._channel: Channel | None = None

    async def take_one(self, probe_id: str, queues: Iterable[QueueName]) -> bool:
        """Begin a request of the first queue that has any; False if none has. Raises `BrokerError` if the connection is
        lost."""
        for queue in queues:
            try:
                if self._channel is None or self._channel.is_closed:
                    self._channel = await self._broker.connection.channel()
                delivery = await self._channel.get(queue)
            except BrokerError as error:
                if self._broker.is_closed:
                    raise
                # RabbitMQ closes the channel if the queue is missing: the next queue needs another channel.
                log.warning("no probe from this request queue", queue=queue, reason=str(error))
                self.close()
                continue
            if delivery is not None:
                log.info("taking one request for a probe", queue=queue, probe=probe_id)
                # Priority 0: the worker consumes no other requests.
                self._processor.accept(delivery, priority=0, broker=self._broker, probe=probe_id)
                return True
        return False

    def close(self) -> None:
        """Close the channel: RabbitMQ then requeues what is not acknowledged."""
        channel, self._channel = self._channel, None
        if channel is not None:
            # Before the close, after which RabbitMQ requeues the requests.
            self._processor.lose(channel)
            self._broker.discard(channel)
