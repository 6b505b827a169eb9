"""The cancel processor: clients ask for the end of a request, the controller tells the group's workers.

Knowing the correlation id and the reply address of a request is the right to cancel it (PROTOCOL, "Control messages").
A cancel that gets lost costs nothing but the work it would have saved.
"""

from __future__ import annotations

from osrdyne.amqp import Delivery, Message
from osrdyne.amqp.consumer import Consumer
from osrdyne.errors import BrokerSilentError, InvalidKeyError, PublishRefusedError
from osrdyne.logs import Logger, get_logger
from osrdyne.metrics import Metrics
from osrdyne.pool.roles import Publisher
from osrdyne.pool.routes_in_force import RoutesInForce
from osrdyne.pool.splitter_in_force import SplitterInForce
from osrdyne.pool.tracker import PoolStateTracker
from osrdyne.processors.edge import contained
from osrdyne.protocol.control import Command, ControlMessage
from osrdyne.protocol.names import Key, PoolNames, parse_key

PREFETCH = 100


class CancelProcessor:
    """Consumes `P-cancel`."""

    def __init__(
        self,
        *,
        names: PoolNames,
        tracker: PoolStateTracker,
        routing: RoutesInForce,
        splitting: SplitterInForce,
        publisher: Publisher,
        metrics: Metrics,
    ) -> None:
        self._names = names
        self._tracker = tracker
        self._routing = routing
        self._splitting = splitting
        self._publisher = publisher
        self._metrics = metrics
        self._log: Logger = get_logger("cancels")

    async def run(self, consumer: Consumer) -> None:
        """Pass cancels on until the consumer ends."""
        async for delivery in consumer:
            await contained(self.process, delivery, otherwise=self._count_invalid, log=self._log)
            await delivery.ack()

    async def _count_invalid(self, _: Delivery) -> None:
        self._metrics.invalid_messages.labels(queue="cancel").inc()

    async def process(self, delivery: Delivery) -> None:
        """One cancel: to every worker that may run the request; the one that does acts."""
        properties = delivery.properties
        try:
            key = parse_key(delivery.routing_key)
            if not properties.correlation_id or not properties.reply_to:
                raise InvalidKeyError("A cancel needs the correlation id and the reply address of its request.")
        except InvalidKeyError as error:
            await self._count_invalid(delivery)
            self._log.debug("cancel ignored", error=str(error))
            return
        message = ControlMessage(
            Command.CANCEL,
            self._tracker.generation,
            {"correlation_id": properties.correlation_id, "reply_to": properties.reply_to},
        )
        for group in self._groups_of(key):
            await self._tell(group, message)

    def _groups_of(self, key: Key) -> set[Key]:
        """Where a request with this key may be: in its own group, in one that the splitter makes, in one that a route
        names."""
        splitter, table = self._splitting.splitter, self._routing.table
        prefix = None if splitter is None else splitter.prefix_of(key)
        known = [] if prefix is None else self._tracker.keys()
        split = [one for one in known if one.startswith(prefix or "")]
        return {key, *split, *(() if table is None else table.manifest.named_keys)}

    async def _tell(self, group: Key, message: ControlMessage) -> None:
        try:
            await self._publisher.publish(
                Message(body=message.wire_body(), persistent=False),
                exchange=self._names.control_exchange,
                routing_key=self._names.control_group_routing_key(group),
            )
        except (PublishRefusedError, BrokerSilentError) as error:
            self._log.warning("cancel not passed on", key=group, error=str(error))
