"""The progress responder: answers inquiries about keys that are starting.

Clients ask only while a call that wants progress has no reply (docs/reference/protocol/progress.md), so that requests
of running keys cost nothing. The leader has the order of the starts in memory and stores nothing of an inquiry, so that
the next leader can answer as well. A lost inquiry or answer costs one line of progress: the client sends another one.
"""

from __future__ import annotations

from osrdyne.amqp import Consumer, Delivery, Message
from osrdyne.errors import BrokerAccessError, BrokerSilentError, InvalidKeyError, PublishRefusedError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import Publisher
from osrdyne.pool.workers.progress import StartForecast
from osrdyne.processors.consumers import ErrorBoundary
from osrdyne.processors.forgeries import Forgeries
from osrdyne.processors.requests.cancellations import GroupsOfKeys
from osrdyne.protocol.messages import JSON_TYPE, Request, Response
from osrdyne.protocol.names import parse_key
from osrdyne.protocol.progress import not_starting

PREFETCH = 100


class ProgressResponder:
    """Consumes `P-progress`."""

    def __init__(
        self,
        context: TermContext,
        *,
        forecast: StartForecast,
        groups: GroupsOfKeys,
        publisher: Publisher,
        forgeries: Forgeries,
    ) -> None:
        self._names, self._metrics = context.names, context.metrics
        self._forecast = forecast
        self._groups = groups
        self._publisher = publisher
        self._forgeries = forgeries
        self._log: Logger = get_logger("progress", pool=self._names.pool)

    async def run(self, consumer: Consumer) -> None:
        """Answer inquiries until the consumer ends."""
        async for delivery in consumer:
            with ErrorBoundary(delivery, self._log) as boundary:
                await self._answer(delivery)
            if boundary.failed:
                self._count_invalid()
            # Crash before: the inquiry returns, and the next leader answers it a second time, which the client shows as
            # one more line of progress. After: it is gone, and the client sends another one.
            await delivery.ack()

    def _count_invalid(self) -> None:
        self._metrics.invalid_messages.labels(queue="progress").inc()

    async def _answer(self, delivery: Delivery) -> None:
        if self._forgeries.is_forged(delivery, self._names.progress_exchange, queue="progress"):
            return
        properties = delivery.properties
        try:
            key = parse_key(delivery.routing_key)
        except InvalidKeyError as error:
            self._count_invalid()
            self._log.debug("inquiry ignored", error=str(error))
            return
        reply_to = properties.reply_to
        inquiry = Request(key=key, body=b"", reply_to=reply_to, correlation_id=properties.correlation_id)
        if not reply_to or self._forgeries.refuses_reply_to(inquiry, component="progress"):
            return
        starts = [start for group in self._groups.likely(key) if (start := self._forecast.of(group)) is not None]
        # A splitter may have made several groups of the key; the last of their starts is the longest wait.
        latest = max(starts, key=lambda start: start.position, default=None)
        body = not_starting() if latest is None else latest.to_json()
        response = Response(body=body, content_type=JSON_TYPE, progress=True)
        message = Message(
            body=response.body,
            headers=response.wire_headers(),
            correlation_id=properties.correlation_id,
            content_type=response.content_type,
            persistent=False,
        )
        try:
            # One attempt, unlike an answer to a request: the client will send another inquiry.
            await self._publisher.publish(message, exchange="", routing_key=reply_to)
        except (PublishRefusedError, BrokerSilentError, BrokerAccessError) as error:
            self._log.debug("inquiry not answered", key=key, error=str(error))
