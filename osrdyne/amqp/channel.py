"""One AMQP channel. It raises the errors of `osrdyne.errors`; any of them but `PublishRefusedError` closes the channel.

aio-pika opens the channel, declares, binds, deletes and cancels. Messages go through the aiormq channel below it,
because what aio-pika makes of a message is not what was received (decision 0042).
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
from osrdyne.amqp.publish_order import PublishOrder
from osrdyne.errors import BrokerUnavailableError, MessageTooLargeError

if TYPE_CHECKING:
    from osrdyne.amqp.connection import Connection

_FRAME_MAX = 131_072
_FRAME_OVERHEAD_BYTES = 8
_HEADER_FIXED_BYTES = 12
_MESSAGE_ID_BYTES = 33  # aiormq gives every message an id
_OTHER_PROPERTIES_AT_MOST = 14 * 256  # everything but the headers is short: at most 255 bytes each


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """The answer to a declare: messages ready for delivery, and consumers (broker: prove-before-delete: not always what
    it seems)."""

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
        self._order = PublishOrder()
        self._closed_here = False
        self._end: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        channel.close_callbacks.add(self._on_closed)
        # aio-pika does not pass this notice on: https://github.com/mosquito/aiormq/issues/116
        underlay.on_consumer_cancel_callbacks.add(self._on_broker_cancel)

    @property
    def is_closed(self) -> bool:
        """Whether the channel is closed, or this side has begun to close it."""
        # RabbitMQ may not have confirmed the close in time; such a channel is not usable any more.
        return self._closed_here or self._channel.is_closed

    @property
    def number(self) -> int:
        """The number of the channel in the frames of its connection."""
        return self._underlay.number

    async def wait_closed(self) -> BaseException | None:
        """Wait until the channel is closed; return the reason, or None if this side closed it."""
        return await asyncio.shield(self._end)

    def _on_closed(self, _: object, reason: BaseException | None) -> None:
        if not self._end.done():
            # A close of this side, or of its connection, is no error for those that wait.
            self._end.set_result(None if self._closed_here or self._connection.closed_here else reason)
        self._end_consumers()

    def _end_consumers(self) -> None:
        for consumer in self._consumers.values():
            consumer.end(BrokerUnavailableError(f"The channel that consumed {consumer.queue} was closed."))
        self._consumers.clear()

    async def _on_broker_cancel(self, frame: spec.Basic.Cancel) -> None:
        # aiormq hands each delivery over in a task. Those that arrived before this notice run first.
        await asyncio.sleep(0)
        # None for a consumer that this side has just cancelled: both notices may cross.
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
        """Request a durable queue without waiting for it: the next answer on this channel shows that it exists. If it
        exists with other arguments, the channel is closed; the next command raises `BrokerConflictError`, or
        `BrokerUnavailableError` when it comes after that."""
        with translated(f"declare queue {name}"):  # aio-pika's queues are declared only with an answer
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
        """Request a binding without waiting for it: the next answer on this channel shows that it exists."""
        with translated(f"bind queue {queue} to {exchange}"):  # aio-pika's queues bind only with an answer
            await self._underlay.queue_bind(
                queue, exchange, routing_key=routing_key, nowait=True, timeout=self._timeout
            )

    async def bind_exchange(
        self, destination: str, source: str, routing_key: str = "", *, arguments: Mapping[str, object] | None = None
    ) -> None:
        """Route messages of `source` on to `destination`, where the binding matches."""
        with translated(f"bind exchange {destination} to {source}"):
            bound = await self._channel.get_exchange(destination, ensure=False)
            await bound.bind(source, routing_key, arguments=_table(arguments), timeout=self._timeout)

    async def unbind_exchange(
        self, destination: str, source: str, routing_key: str = "", *, arguments: Mapping[str, object] | None = None
    ) -> None:
        """Remove a binding; a missing one is not an error, nor is a missing exchange."""
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
        """Request the deletion of a queue without waiting for it; the next answer on this channel comes after it."""
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
        """Consume a queue; `prefetch` unacknowledged deliveries at most (0: no limit)."""
        consumer = Consumer(queue, tag=self._new_tag())
        # Before RabbitMQ has the tag: deliveries, or its cancel, may arrive before the answer.
        self._consumers[consumer.tag] = consumer
        await self._start(consumer, prefetch=prefetch, no_ack=no_ack, arguments=arguments or {})
        return consumer

    def _new_tag(self) -> str:
        # Of a fixed width: RabbitMQ returns the messages of a lost channel in the order of the tags (broker:
        # returns-by-tag).
        return f"c{next(self._consumer_numbers):010}"

    async def _start(
        self, consumer: Consumer, *, prefetch: int, no_ack: bool = False, arguments: Mapping[str, object]
    ) -> None:
        """Send `basic.consume` for a consumer in `_consumers`; nothing if it was cancelled before."""
        tag = consumer.tag

        async def deliver(message: DeliveredMessage) -> None:
            consumer.put(Delivery.from_aiormq(self, message))

        try:
            with translated(f"consume queue {consumer.queue}"):
                # A prefetch concerns unacknowledged deliveries; without acknowledgements there are none.
                if not no_ack:
                    await self._channel.set_qos(prefetch, timeout=self._timeout)
                # `cancel` of this tag is already on its way: a consume behind it would take messages for no reader.
                if tag not in self._consumers:
                    return
                await self._underlay.basic_consume(
                    consumer.queue,
                    deliver,
                    no_ack=no_ack,
                    arguments=_table(arguments),
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
            await self._start(consumer, prefetch=prefetch, arguments={})

    async def cancel(self, consumer: Consumer) -> None:
        """Stop consuming; deliveries that have arrived stay unacknowledged and are still handed out."""
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
        """Send a request that cannot fail (the prefetch of consumers to come) and wait for the answer."""
        with translated("ask RabbitMQ for a sign of life"):
            await self._channel.set_qos(0, timeout=self._timeout)

    async def get(self, queue: str) -> Delivery | None:
        """Take one message, or None when the queue is empty."""
        with translated(f"read queue {queue}"):
            message = await self._underlay.basic_get(queue, timeout=self._timeout)
        if isinstance(message.delivery, spec.Basic.GetEmpty):
            return None
        return Delivery.from_aiormq(self, message)

    async def ack(self, tag: int, *, multiple: bool = False) -> None:
        """Acknowledge one delivery, or with `multiple` every one up to it.

        RabbitMQ may still hold acknowledgements of single deliveries when it closes the channel, and it forgets them;
        those of one call take effect together.
        """
        with translated("acknowledge a message"):
            # Not waited for: an acknowledgement has no answer, and one that is lost makes a duplicate, never a loss.
            await self._underlay.basic_ack(tag, multiple=multiple, wait=False)

    async def nack(self, tag: int, *, requeue: bool) -> None:
        with translated("give a message back"):
            await self._underlay.basic_nack(tag, requeue=requeue, wait=False)

    async def reject(self, tag: int, *, requeue: bool) -> None:
        with translated("reject a message"):
            await self._underlay.basic_reject(tag, requeue=requeue, wait=False)

    async def publish(self, message: Message, *, exchange: str, routing_key: str, mandatory: bool = False) -> None:
        """Publish; on a channel with confirms, return once the broker has confirmed the message.

        Messages to one destination leave in the order of the calls. Raises `PublishRefusedError` when the broker
        refused it, or it was `mandatory` and unroutable (the channel stays open), and `BrokerUnavailableError` when no
        answer came: the broker may have the message or not. While the broker blocks publishers (an alarm), no time-out
        runs. Raises `MessageTooLargeError`, and sends nothing, when the headers are too large for the broker.
        """
        properties = message.properties()
        self._check_size(message, properties)
        where = f"publish to {exchange or 'queue'} {routing_key!r}" if not exchange else f"publish to {exchange}"
        with translated(where):
            destination = (exchange, routing_key)
            if self._order.is_free(message.message_id, destination):
                return await self._publish(message, properties, exchange, routing_key, mandatory)
            # aiormq matches returned messages by their id: two of one id must not be in flight together.
            async with self._order.ticket(message.message_id, destination):
                await self._publish(message, properties, exchange, routing_key, mandatory)

    async def _publish(
        self, message: Message, properties: spec.Basic.Properties, exchange: str, routing_key: str, mandatory: bool
    ) -> None:
        """Publish now. Raises `TimeoutError` when no confirm comes in time and the broker has not blocked us."""
        # A blocked connection confirms nothing and takes nothing; its silence does not mean that a queue has no leader.
        with ConfirmTimeout(self._timeout, lambda: self._connection.is_blocked):
            await self._underlay.basic_publish(
                message.body,
                exchange=exchange,
                routing_key=routing_key,
                properties=properties,
                mandatory=mandatory,
                wait=False,
            )

    def _check_size(self, message: Message, properties: spec.Basic.Properties) -> None:
        """Refuse a header that does not fit into a frame: RabbitMQ would end the connection (501)."""
        limit = (self._underlay.connection.connection_tune.frame_max or _FRAME_MAX) - _FRAME_OVERHEAD_BYTES
        if message.headers_at_most() + _OTHER_PROPERTIES_AT_MOST <= limit:
            return  # nearly always, and much cheaper than to encode them
        size = _HEADER_FIXED_BYTES + len(properties.marshal()) + (0 if properties.message_id else _MESSAGE_ID_BYTES)
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
