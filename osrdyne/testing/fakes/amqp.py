"""Connections and channels of a `FakeBroker`, with the interface of the real classes.

A channel behaves as described in docs/design/broker.md: a refused or cancelled command closes it, its unacknowledged
messages return to their queues when it closes, and its consumers then end with an error.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from osrdyne.amqp import Channel, Connection, ConnectionOptions, Consumer, Delivery, Message, QueueInfo
from osrdyne.amqp.errors import translated
from osrdyne.amqp.version import BrokerVersion
from osrdyne.broker.session import Connect
from osrdyne.errors import (
    BrokerConflictError,
    BrokerError,
    BrokerNotFoundError,
    BrokerUnavailableError,
    PublishRefusedError,
)
from osrdyne.protocol.statuses import Status
from osrdyne.testing.fakes.broker import NOTHING, FakeBroker, FakeQueue, Holder, Stored

T = TypeVar("T")


class FakeChannel(Channel):
    """A channel of a `FakeConnection`."""

    is_closed = False

    def __init__(self, broker: FakeBroker, *, confirms: bool = False, connection: object = None) -> None:
        """`confirms` has no effect: every publish waits until the message is in its queues. `connection` None: the
        channel counts as a connection of its own."""
        self.broker = broker
        self._connection_of = connection or self
        self._closed = asyncio.Event()
        self._reason: BaseException | None = None
        self._tags = itertools.count(1)
        self._numbers = itertools.count(1)
        self._held: dict[int, tuple[FakeQueue, Holder]] = {}
        self._holders: dict[str, tuple[FakeQueue, Holder, Consumer]] = {}

    async def wait_closed(self) -> BaseException | None:
        await self._closed.wait()
        return self._reason

    async def close(self) -> None:
        self.end(None)

    def end(self, reason: BaseException | None) -> None:
        """Close the channel, by the client or the broker. Its unacknowledged messages return to their queues."""
        if self.is_closed:
            return
        self.is_closed = True
        self._reason = reason
        self._closed.set()
        # In order, so that a repeated history is the same.
        touched = dict.fromkeys(
            [queue for queue, _ in self._held.values()] + [one[0] for one in self._holders.values()]
        )
        for tag, (queue, holder) in sorted(self._held.items()):
            self.broker.give_back(queue, holder.held.pop(tag))
        for _, holder, consumer in self._holders.values():
            holder.active = False
            consumer.end(BrokerUnavailableError(f"The channel that consumed {consumer.queue} was closed."))
        self._held.clear()
        self._holders.clear()
        for queue in touched:
            queue.changed()

    # --- commands

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
        if passive:
            return await self._command("look_up", name, lambda: self.broker.look_up(name).info)
        return await self._command("declare", name, lambda: self.broker.declare_queue(name, arguments or {}).info)

    async def begin_declare_queue(self, name: str, *, arguments: Mapping[str, object] | None = None) -> None:
        # A refusal closes the channel before the next command, whose error does not contain the reason.
        with suppress(BrokerConflictError):
            await self.declare_queue(name, arguments=arguments)

    async def declare_exchange(
        self, name: str, kind: str, *, arguments: Mapping[str, object] | None = None, passive: bool = False
    ) -> None:
        await self._command("declare_exchange", name, lambda: self.broker.declare_exchange(name, kind, arguments or {}))

    async def bind_queue(
        self, queue: str, exchange: str, routing_key: str = "", *, arguments: Mapping[str, object] | None = None
    ) -> None:
        await self._command("bind", queue, lambda: self.broker.bind(queue, exchange, routing_key, arguments or {}))

    async def begin_bind_queue(self, queue: str, exchange: str, routing_key: str) -> None:
        await self.bind_queue(queue, exchange, routing_key)

    async def unbind_queue(
        self, queue: str, exchange: str, routing_key: str = "", *, arguments: Mapping[str, object] | None = None
    ) -> None:
        await self._command("unbind", queue, lambda: self.broker.unbind(queue, exchange, routing_key, arguments or {}))

    async def bind_exchange(
        self, destination: str, source: str, routing_key: str = "", *, arguments: Mapping[str, object] | None = None
    ) -> None:
        await self._command(
            "bind", destination, lambda: self.broker.bind_exchange(destination, source, arguments or {})
        )

    async def unbind_exchange(
        self, destination: str, source: str, routing_key: str = "", *, arguments: Mapping[str, object] | None = None
    ) -> None:
        await self._command(
            "unbind", destination, lambda: self.broker.unbind(destination, source, routing_key, arguments or {})
        )

    async def delete_queue(self, name: str) -> int:
        return await self._command("delete", name, lambda: self.broker.delete_queue(name))

    async def begin_delete_queue(self, name: str) -> None:
        await self.delete_queue(name)

    async def ping(self) -> None:
        await self._command("ping", "", lambda: None)

    async def consume(
        self,
        queue: str,
        *,
        prefetch: int = 0,
        no_ack: bool = False,
        arguments: Mapping[str, object] | None = None,
    ) -> Consumer:
        return await self._command("consume", queue, lambda: self._consume(queue, prefetch, arguments=arguments or {}))

    def _consume(
        self, name: str, prefetch: int, consumer: Consumer | None = None, *, arguments: Mapping[str, object] = NOTHING
    ) -> Consumer:
        queue = self.broker.look_up(name)
        if not queue.running:
            self.end(BrokerUnavailableError(f"RabbitMQ did not answer in time while trying to consume queue {name}."))
            self._check()
        consumer = consumer or Consumer(name)
        consumer.tag = f"c{next(self._numbers)}"
        consumer.begin(prefetch)
        holder = Holder(
            deliver=lambda stored: consumer.put(self._deliver(queue, holder, stored)),
            on_delete=lambda: self._queue_deleted(consumer),
            connection=self._connection_of,
            prefetch=prefetch,
            priority=priority if isinstance(priority := arguments.get("x-priority"), int) else 0,
        )
        self._holders[consumer.tag] = (queue, holder, consumer)
        queue.holders.append(holder)
        queue.changed()
        return consumer

    def _queue_deleted(self, consumer: Consumer) -> None:
        if self._holders.pop(consumer.tag, None) is not None:
            consumer.end(BrokerUnavailableError(f"RabbitMQ cancelled the consumer of {consumer.queue}."))

    async def take_more(self, consumer: Consumer, *, prefetch: int) -> None:
        queue, holder, _ = self._holders.pop(consumer.tag, (None, None, None))
        if queue is None or holder is None:
            return
        holder.active = False

        def consume_again() -> None:
            if not consumer.ended:  # not cancelled meanwhile
                self._consume(consumer.queue, prefetch, consumer)

        await self._command("consume", consumer.queue, consume_again)

    async def cancel(self, consumer: Consumer) -> None:
        """Cancel a consumer. As long as the channel holds its deliveries, it counts as a consumer."""
        await self._command("cancel", consumer.queue, lambda: self._cancel(consumer))

    def _cancel(self, consumer: Consumer) -> None:
        queue, holder, _ = self._holders.pop(consumer.tag, (None, None, None))
        if queue is not None and holder is not None:
            holder.active = False
            queue.changed()
        consumer.end()

    async def get(self, queue: str) -> Delivery | None:
        return await self._command("get", queue, lambda: self._get(queue))

    def _get(self, name: str) -> Delivery | None:
        queue = self.broker.look_up(name)
        if queue.is_single:
            raise BrokerConflictError(f"RESOURCE_LOCKED - basic.get operations are not supported by {name}")
        if not queue.ready or not queue.running:
            return None
        holder = Holder(deliver=lambda stored: None, on_delete=lambda: None, active=False)
        delivery = self._deliver(queue, holder, queue.ready.pop(0))
        queue.holders.append(holder)
        queue.changed()
        return delivery

    def _deliver(self, queue: FakeQueue, holder: Holder, stored: Stored) -> Delivery:
        tag = next(self._tags)
        holder.held[tag] = stored
        self._held[tag] = (queue, holder)
        properties = stored.message.properties()
        if stored.returns:
            properties.headers = {**stored.message.headers, "x-delivery-count": stored.returns}  # type: ignore[dict-item]
        return Delivery(
            channel=self,
            tag=tag,
            exchange=stored.exchange,
            routing_key=stored.routing_key,
            redelivered=stored.returns > 0,
            body=stored.message.body,
            properties=properties,
        )

    async def ack(self, tag: int, *, multiple: bool = False) -> None:
        def settle() -> None:
            for one in [held for held in self._held if held <= tag] if multiple else [tag]:
                self._settle(one, counted=None)

        await self._command("ack", self._queue_of(tag), settle)

    async def nack(self, tag: int, *, requeue: bool) -> None:
        counted = BrokerVersion.parse(self.broker.version).counts_nack
        await self._command("nack", self._queue_of(tag), lambda: self._settle(tag, counted=counted))

    async def reject(self, tag: int, *, requeue: bool) -> None:
        settle = (lambda: self._settle(tag, counted=True)) if requeue else (lambda: self._drop(tag))
        await self._command("reject", self._queue_of(tag), settle)

    def _queue_of(self, tag: int) -> str:
        return self._held[tag][0].name if tag in self._held else ""

    def _settle(self, tag: int, *, counted: bool | None) -> None:
        queue, stored = self._take_back(tag)
        if counted is not None:
            self.broker.give_back(queue, stored, counted=counted)
        queue.changed()

    def _drop(self, tag: int) -> None:
        queue, stored = self._take_back(tag)
        self.broker.die(queue, stored, Status.REJECTED)
        queue.changed()

    def _take_back(self, tag: int) -> tuple[FakeQueue, Stored]:
        if tag not in self._held:
            raise BrokerConflictError(f"PRECONDITION_FAILED - unknown delivery tag {tag}")
        queue, holder = self._held.pop(tag)
        for _, _, consumer in self._holders.values():
            consumer.settle(tag)
        return queue, holder.held.pop(tag)

    async def publish(self, message: Message, *, exchange: str, routing_key: str, mandatory: bool = False) -> None:
        """Publish; returns once the message is in its queues."""
        self._check()
        await self.broker.pass_hook("publish", exchange or routing_key, done=False)
        self._check()
        try:
            routed = await self.broker.publish(message, exchange=exchange, routing_key=routing_key)
        except BrokerNotFoundError as error:
            self.end(error)
            raise
        await self.broker.pass_hook("publish", exchange or routing_key, done=True)
        self._check()
        if mandatory and not routed:
            raise PublishRefusedError(f"Could not publish to {exchange or routing_key}: there is no queue for it.")

    async def _command(self, name: str, target: str, act: Callable[[], T]) -> T:
        self._check()
        try:
            await self.broker.pass_hook(name, target, done=False)
            self._check()
            answer = act()
            await self.broker.pass_hook(name, target, done=True)
        except asyncio.CancelledError:
            self.end(None)
            raise
        except BrokerError as error:
            self.end(error)
            raise
        self._check()
        return answer

    def _check(self) -> None:
        if self.is_closed:
            raise BrokerUnavailableError(f"The channel was closed: {self._reason or 'by ourselves'}.")


class FakeConnection(Connection):
    """A connection to a `FakeBroker`; `cut` ends it as a lost network or a killed process does."""

    def __init__(self, broker: FakeBroker, options: ConnectionOptions) -> None:
        self.options = options
        self.broker = broker
        self.channels: list[FakeChannel] = []
        self._closed = asyncio.Event()
        self._reason: BaseException | None = None

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    @property
    def is_blocked(self) -> bool:
        return False

    @property
    def max_channels(self) -> int:
        return 2047

    async def wait_unblocked(self) -> None:
        return

    @property
    def server_version(self) -> str:
        return self.broker.version

    async def wait_closed(self) -> BaseException | None:
        await self._closed.wait()
        return self._reason

    async def channel(self, *, confirms: bool = False) -> Channel:
        await self.broker.pass_hook("channel", "", done=True)
        if self.is_closed:
            raise BrokerUnavailableError("The connection to RabbitMQ is closed.")
        self.channels = [channel for channel in self.channels if not channel.is_closed]
        self.channels.append(FakeChannel(self.broker, confirms=confirms, connection=self))
        return self.channels[-1]

    async def close(self, *, timeout: float = 0.0) -> None:
        self.cut(None)

    def cut(self, reason: BaseException | None = None) -> None:
        if not self.is_closed:
            self._reason = reason
            self._closed.set()
            for channel in self.channels:
                channel.end(reason or BrokerUnavailableError("The connection was closed."))


def connect_to(broker: FakeBroker, connections: list[FakeConnection] | None = None) -> Connect:
    """A `connect` function for this broker; it appends the connections that it opens to `connections`."""

    async def connect(options: ConnectionOptions) -> Connection:
        await broker.pass_hook("connect", options.name, done=True)
        connection = FakeConnection(broker, options)
        if connections is not None:
            connections.append(connection)
        return connection

    return connect


# Operations that operators may do on a real RabbitMQ while osrdyne runs, and that osrdyne itself never does.

TIMEOUT = 30.0


async def purge_queue(channel: Channel, name: str) -> int:
    """Purge a queue; returns the number of dropped messages."""
    with translated(f"purge queue {name}"):
        answer = await channel._underlay.queue_purge(name, timeout=TIMEOUT)
    return answer.message_count or 0


async def delete_exchange(channel: Channel, name: str) -> None:
    """Delete an exchange; a missing one is not an error."""
    with translated(f"delete exchange {name}"):
        await channel._underlay.exchange_delete(name, timeout=TIMEOUT)
