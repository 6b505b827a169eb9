"""One AMQP channel. It raises the errors of `osrdyne.errors`; any of them but `PublishRefusedError` closes the channel.

aio-pika opens the channel, declares, binds, deletes and cancels. Messages pass through the aiormq channel below it,
because aio-pika's messages differ from what RabbitMQ delivered (decision 0042).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiormq
from aio_pika.abc import AbstractChannel
from aiormq.abc import DeliveredMessage
from pamqp import commands as spec

from osrdyne.amqp.confirm_timeout import ConfirmTimeout
from osrdyne.amqp.consumer import Consumer
from osrdyne.amqp.errors import translated
from osrdyne.amqp.message import Delivery, Message
from osrdyne.amqp.publish_numbers import NumberedProperties
from osrdyne.errors import BrokerUnavailableError, MessageTooLargeError
from osrdyne.protocol.messages import PUBLISH_HEADER

if TYPE_CHECKING:
    from osrdyne.amqp.connection import Connection

_FRAME_MAX = 131_072
_FRAME_OVERHEAD_BYTES = 8
_HEADER_FIXED_BYTES = 12
_MAX_OTHER_PROPERTIES = 14 * 256  # At most 255 bytes for each of the 13 properties, and for the number of the publish.


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """The answer to a declare: messages ready for delivery, and consumers. Zeros prove nothing (broker:
    prove-before-delete)."""

    ready: int
    consumers: int


class Channel:
    """A channel of a `Connection`, with time-outs from the connection's options."""

    def __init__(self, connection: Connection, channel: AbstractChannel, underlay: aiormq.Channel) -> None:
        self._connection = connection
        self._channel = channel
        self._underlay = underlay
        self._timeout = connection.options.rpc_timeout
        self._consumers: dict[str, Consumer] = {}
        self._consumer_numbers = itertools.count(1)
        self._publish_numbers = itertools.count(1)
        self._closed_here = False
        self._end: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        channel.close_callbacks.add(self._on_closed)
        # aio-pika does not report a cancel by RabbitMQ: https://github.com/mosquito/aiormq/issues/116
        underlay.on_consumer_cancel_callbacks.add(self._on_broker_cancel)

    @property
    def is_closed(self) -> bool:
        """Whether the channel is closed, or this side has begun to close it."""
        # RabbitMQ may not have confirmed the close in time; such a channel is not usable any more.
        return self._closed_here or self._underlay.is_closed

    @property
    def number(self) -> int:
        """The number of the channel in the frames of its connection."""
        return self._underlay.number

    async def wait_closed(self) -> BaseException | None:
        """Wait until the channel is closed; return the reason, or None if this side closed it."""
        return await asyncio.shield(self._end)

    def _on_closed(self, _: object, reason: BaseException | None) -> None:
        if not self._end.done():
            self._end.set_result(None if self._closed_here or self._connection.closed_here else reason)
        self._end_consumers()

    def _end_consumers(self) -> None:
        for consumer in self._consumers.values():
            consumer.end(BrokerUnavailableError(f"The channel that consumed {consumer.queue} was closed."))
        self._consumers.clear()

    async def _on_broker_cancel(self, frame: spec.Basic.Cancel) -> None:
        # aiormq passes each delivery on in a task. The tasks of deliveries before this notice run first.
        await asyncio.sleep(0)
        # None if this side has just cancelled the consumer, too.
        consumer = self._consumers.pop(frame.consumer_tag or "", None)
        if consumer is not None:
            consumer.end(BrokerUnavailableError(f"RabbitMQ cancelled the consumer of {consumer.queue}."))

    async def declare_queue(
        self,
        name: str,
        *,
        arguments: Mapping[str, object] | None = None,
        durable: bool = True,
        exclusive: bool = False,
        auto_delete: bool = False,
        passive: bool = False,
    ) -> QueueInfo:
        """Declare a queue. Raises `BrokerConflictError` when it exists with other arguments, and
        `BrokerNotFoundError` when `passive` and it does not exist; both close the channel."""
        with translated(f"{'look up' if passive else 'declare'} queue {name}"):
            queue = await self._channel.declare_queue(
                name,
                passive=passive,
                durable=durable,
                exclusive=exclusive,
                auto_delete=auto_delete,
                arguments=_table(arguments),
                timeout=self._timeout,
            )
        answer = queue.declaration_result
        return QueueInfo(ready=answer.message_count or 0, consumers=answer.consumer_count or 0)

    async def begin_declare_queue(self, name: str, *, arguments: Mapping[str, object] | None = None) -> None:
        """Declare a durable queue without waiting: the next answer on this channel shows that it exists. If it exists
        with other arguments, RabbitMQ closes the channel: the next command raises `BrokerConflictError`, or
        `BrokerUnavailableError` if it starts after the close."""
        with translated(f"declare queue {name}"):  # aio-pika always waits for the answer
            await self._underlay.queue_declare(
                name, durable=True, nowait=True, arguments=_table(arguments), timeout=self._timeout
            )

    async def declare_exchange(
        self, name: str, kind: str, *, arguments: Mapping[str, object] | None = None, passive: bool = False
    ) -> None:
        with translated(f"declare exchange {name}"):
            await self._channel.declare_exchange(
                name, kind, durable=True, passive=passive, arguments=_table(arguments), timeout=self._timeout
            )

    async def bind_queue(
        self, queue: str, exchange: str, routing_key: str = "", *, arguments: Mapping[str, object] | None = None
    ) -> None:
        with translated(f"bind queue {queue} to {exchange}"):
            bound = await self._channel.get_queue(queue, ensure=False)
            await bound.bind(exchange, routing_key, arguments=_table(arguments), timeout=self._timeout)

    async def unbind_queue(
        self, queue: str, exchange: str, routing_key: str = "", *, arguments: Mapping[str, object] | None = None
    ) -> None:
        """Remove a binding; a missing one is not an error."""
        with translated(f"unbind queue {queue} from {exchange}"):
            bound = await self._channel.get_queue(queue, ensure=False)
            await bound.unbind(exchange, routing_key, arguments=_table(arguments), timeout=self._timeout)

    async def begin_bind_queue(self, queue: str, exchange: str, routing_key: str) -> None:
        """Bind a queue without waiting: the next answer on this channel shows that the binding exists."""
        with translated(f"bind queue {queue} to {exchange}"):  # aio-pika always waits for the answer
            await self._underlay.queue_bind(
                queue, exchange, routing_key=routing_key, nowait=True, timeout=self._timeout
            )

    async def bind_exchange(
        self, destination: str, source: str, routing_key: str = "", *, arguments: Mapping[str, object] | None = None
    ) -> None:
        """Bind an exchange: messages of `source` that match the binding are routed to `destination`."""
        with translated(f"bind exchange {destination} to {source}"):
            bound = await self._channel.get_exchange(destination, ensure=False)
            await bound.bind(source, routing_key, arguments=_table(arguments), timeout=self._timeout)

    async def unbind_exchange(
        self, destination: str, source: str, routing_key: str = "", *, arguments: Mapping[str, object] | None = None
    ) -> None:
        """Remove a binding; neither a missing binding nor a missing exchange is an error."""
        with translated(f"unbind exchange {destination} from {source}"):
            bound = await self._channel.get_exchange(destination, ensure=False)
            await bound.unbind(source, routing_key, arguments=_table(arguments), timeout=self._timeout)

    async def delete_queue(self, name: str) -> int:
        """Delete a queue and everything in it; return how many messages were ready. A missing one is not an error.

        Never sends if-empty or if-unused: quorum queues close the connection on them (broker: prove-before-delete).
        """
        with translated(f"delete queue {name}"):
            answer = await self._channel.queue_delete(name, timeout=self._timeout)
        return answer.message_count or 0

    async def begin_delete_queue(self, name: str) -> None:
        """Delete a queue without waiting: the next answer on this channel shows that it is deleted."""
        with translated(f"delete queue {name}"):
            await self._channel.queue_delete(name, nowait=True, timeout=self._timeout)

    async def consume(
        self,
        queue: str,
        *,
        prefetch: int = 0,
        no_ack: bool = False,
        arguments: Mapping[str, object] | None = None,
    ) -> Consumer:
        """Consume a queue, with at most `prefetch` unacknowledged deliveries (0: no limit)."""
        consumer = Consumer(queue, tag=self._new_tag(), arguments=arguments)
        # Before RabbitMQ has the tag: deliveries, or its cancel, may arrive before the answer.
        self._consumers[consumer.tag] = consumer
        await self._start(consumer, prefetch=prefetch, no_ack=no_ack)
        return consumer

    def _new_tag(self) -> str:
        # With a fixed width: RabbitMQ returns the messages of a lost channel in the order of the tags (broker:
        # returns-by-tag).
        return f"c{next(self._consumer_numbers):010}"

    async def _start(self, consumer: Consumer, *, prefetch: int, no_ack: bool = False) -> None:
        """Send `basic.consume` for a consumer in `_consumers`; nothing if it was cancelled before."""
        tag = consumer.tag

        async def deliver(message: DeliveredMessage) -> None:
            consumer.put(Delivery.from_aiormq(self, message))

        try:
            with translated(f"consume queue {consumer.queue}"):
                # Without acknowledgements a prefetch has no effect.
                if not no_ack:
                    await self._channel.set_qos(prefetch, timeout=self._timeout)
                # `cancel` of this tag is already on its way: a consume behind it would take messages for no reader.
                if tag not in self._consumers:
                    return
                consumer.begin(0 if no_ack else prefetch)
                await self._underlay.basic_consume(
                    consumer.queue,
                    deliver,
                    no_ack=no_ack,
                    arguments=_table(consumer.arguments),
                    consumer_tag=tag,
                    timeout=self._timeout,
                )
        except BaseException:
            self._consumers.pop(tag, None)
            raise
        if self.is_closed:
            self._end_consumers()

    async def take_more(self, consumer: Consumer, *, prefetch: int) -> None:
        """Allow a consumer `prefetch` deliveries on top of those that it holds, by consuming again.

        Deliveries that it holds stay with this channel, and later ones follow in RabbitMQ's order (broker:
        single-active-consumer). Does nothing if the consumer is cancelled before or meanwhile.
        """
        old = consumer.tag
        if self._consumers.pop(old, None) is None:
            return
        # A new tag: RabbitMQ may still send deliveries of the old one, and would refuse a tag in use.
        consumer.tag = self._new_tag()
        self._consumers[consumer.tag] = consumer  # a close of the channel must end it in between, too
        with translated(f"consume queue {consumer.queue} again"):
            # Cancelled first: in between, messages stay in the queue, in their order.
            await self._basic_cancel(consumer.queue, old)
        # `cancel`, or the end of the channel, removes the tag while the answer is awaited.
        if consumer.tag in self._consumers:
            await self._start(consumer, prefetch=prefetch)

    async def cancel(self, consumer: Consumer) -> None:
        """Stop consuming. Deliveries that have arrived stay unacknowledged, and the consumer still returns them."""
        try:
            if self._consumers.pop(consumer.tag, None) is not None and not self.is_closed:
                with translated(f"cancel the consumer of {consumer.queue}"):
                    await self._basic_cancel(consumer.queue, consumer.tag)
        finally:
            consumer.end()

    async def _basic_cancel(self, queue: str, tag: str) -> None:
        consumed = await self._channel.get_queue(queue, ensure=False)
        await consumed.cancel(tag, timeout=self._timeout)

    async def ping(self) -> None:
        """Send a command that cannot fail, the prefetch of later consumers, and wait for the answer."""
        with translated("ping RabbitMQ"):
            await self._channel.set_qos(0, timeout=self._timeout)

    async def get(self, queue: str) -> Delivery | None:
        """Get one message; None if the queue is empty."""
        with translated(f"read queue {queue}"):
            message = await self._underlay.basic_get(queue, timeout=self._timeout)
        if isinstance(message.delivery, spec.Basic.GetEmpty):
            return None
        return Delivery.from_aiormq(self, message)

    async def ack(self, tag: int, *, multiple: bool = False) -> None:
        """Acknowledge one delivery, or with `multiple` all deliveries up to it.

        RabbitMQ may buffer acknowledgements of single deliveries, and drops them if it closes the channel; those of one
        call take effect together.
        """
        self._note_settled(tag, multiple=multiple)
        with translated("acknowledge a message"):
            # Acknowledgements have no answer. A lost one causes a duplicate, never a loss.
            await self._underlay.basic_ack(tag, multiple=multiple, wait=False)

    async def nack(self, tag: int, *, requeue: bool) -> None:
        self._note_settled(tag)
        with translated("return a message"):
            await self._underlay.basic_nack(tag, requeue=requeue, wait=False)

    async def reject(self, tag: int, *, requeue: bool) -> None:
        self._note_settled(tag)
        with translated("reject a message"):
            await self._underlay.basic_reject(tag, requeue=requeue, wait=False)

    def _note_settled(self, tag: int, *, multiple: bool = False) -> None:
        for consumer in self._consumers.values():
            consumer.settle(tag, multiple=multiple)

    async def publish(self, message: Message, *, exchange: str, routing_key: str, mandatory: bool = False) -> None:
        """Publish; on a channel with confirms, return once the broker has confirmed the message.

        Messages to one destination leave in the order of the calls. Raises `PublishRefusedError` if the broker refuses
        the message, or if it is `mandatory` and unroutable; the channel stays open. Raises `BrokerUnavailableError` if
        no answer comes: the broker may have the message or not. While an alarm blocks publishers, no time-out runs.
        Raises `MessageTooLargeError`, and sends nothing, if the headers are too large for the broker.
        """
        properties, number = message.properties(), str(next(self._publish_numbers))
        if mandatory:
            assert properties.headers is not None
            properties.headers[PUBLISH_HEADER] = number
        self._check_size(message, properties)
        where = f"publish to {exchange or 'queue'} {routing_key!r}" if not exchange else f"publish to {exchange}"
        # Without a confirm in time a queue counts as leaderless; a blocked connection must not have that effect.
        with translated(where), ConfirmTimeout(self._timeout, lambda: self._connection.is_blocked):
            await self._underlay.basic_publish(
                message.body,
                exchange=exchange,
                routing_key=routing_key,
                properties=NumberedProperties(number, properties),  # type: ignore[arg-type]
                mandatory=mandatory,
                wait=False,
            )

    def _check_size(self, message: Message, properties: spec.Basic.Properties) -> None:
        """Refuse headers that do not fit into a frame: RabbitMQ would close the connection (501)."""
        limit = (self._underlay.connection.connection_tune.frame_max or _FRAME_MAX) - _FRAME_OVERHEAD_BYTES
        if message.max_header_bytes() + _MAX_OTHER_PROPERTIES <= limit:
            return  # nearly always, without encoding them
        size = _HEADER_FIXED_BYTES + len(properties.marshal())
        if size > limit:
            raise MessageTooLargeError(f"The headers of the message have {size} bytes; RabbitMQ allows {limit}.")

    async def close(self) -> None:
        """Close the channel; unacknowledged deliveries return to their queues."""
        for consumer in self._consumers.values():
            consumer.end()
        self._consumers.clear()
        if not self._channel.is_closed:
            self._closed_here = True
            try:
                with translated("close a channel"):
                    # Not aio-pika's close, which adds an observer to the connection and never removes it.
                    await self._underlay.close(timeout=self._timeout)
            except BrokerUnavailableError:
                return  # the connection is lost, or RabbitMQ does not answer: the channel ends with its connection


def _table(arguments: Mapping[str, object] | None) -> dict[str, Any]:
    """Copy a table for the library, which declares fewer types for its values than it encodes."""
    return dict(arguments or {})
