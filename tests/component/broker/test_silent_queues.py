"""A queue that confirms nothing concerns its key alone; a connection that is silent concerns the term."""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import Any

import pytest

from osrdyne.amqp import Message
from osrdyne.broker.publishing import isolation
from osrdyne.broker.publishing.isolation import FORGET_AFTER, FRESH, MAX_UNCONFIRMED, SPARE
from osrdyne.broker.publishing.publisher import LeaderPublisher
from osrdyne.errors import BrokerError, BrokerSilentError, BrokerUnavailableError, PublishRefusedError
from osrdyne.testing.clock import VirtualClock

SILENT = BrokerSilentError("RabbitMQ did not answer in time.")
TIMEOUT, HELD_UP = 30.0, 65.0


class Node:
    """Queues in memory, some of which have no leader, the channels to them, and who publishes there."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.without_leader: set[str] = set()
        self.taken: list[tuple[str, bytes]] = []
        self.channels: list[HeldChannel] = []
        self.is_blocked = False
        self.blocks_at_open = False
        self.max_channels = 2047
        self.unblocked = asyncio.Event()
        self.refuses = False
        self.shared = HeldChannel(self)
        self.tasks: list[asyncio.Task[None]] = []
        self.errors: dict[bytes, BrokerError] = {}

    async def wait_unblocked(self) -> None:
        if self.is_blocked:
            await self.unblocked.wait()

    async def channel(self, *, confirms: bool = False) -> HeldChannel:
        self.is_blocked |= self.blocks_at_open
        if self.is_blocked:
            raise SILENT
        self.channels.append(HeldChannel(self))
        return self.channels[-1]

    @cached_property
    def publisher(self) -> LeaderPublisher:
        """Its bounds are those of the node at the first publish."""
        shared: Any = self.shared
        connection: Any = self
        return LeaderPublisher(shared, connection, clock=self.clock)

    def publish(self, queue: str, *bodies: bytes) -> None:
        self.tasks += [asyncio.create_task(self._publish(queue, body)) for body in bodies]

    async def _publish(self, queue: str, body: bytes) -> None:
        try:
            await self.publisher.publish(Message(body=body), exchange="", routing_key=queue)
        except BrokerError as error:
            self.errors[body] = error


class HeldChannel:
    """As a channel of RabbitMQ 3.10: the first message for a queue without a leader holds up all that comes later."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._known: set[str] = set()
        self._free_at = 0.0
        self.sent: list[bytes] = []
        self.is_closed = False

    async def publish(self, message: Message, *, routing_key: str, **_: object) -> None:
        self.sent.append(message.body)
        if self._node.refuses:
            raise PublishRefusedError("unroutable")
        await self._turn()
        if routing_key in self._node.without_leader:
            self._free_at = self._now + (0.0 if routing_key in self._known else HELD_UP)
            await self._node.clock.sleep(TIMEOUT)
            raise SILENT
        self._known.add(routing_key)
        self._node.taken.append((routing_key, message.body))

    async def ping(self) -> None:
        await self._turn()

    async def close(self) -> None:
        self.is_closed = True

    @property
    def _now(self) -> float:
        return self._node.clock.monotonic()

    async def _turn(self) -> None:
        wait = self._free_at - self._now
        if wait > 0:
            await self._node.clock.sleep(min(wait, TIMEOUT))
        if wait > TIMEOUT:
            raise SILENT


@pytest.fixture
async def node(clock):
    node = Node(clock)
    yield node
    for task in node.tasks:
        if task.done():
            task.result()
        task.cancel()


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


@pytest.mark.parametrize(("alive", "is_silence"), [(True, True), (False, False)], ids=["queue", "connection"])
async def test_silence_is_distinguished_from_a_lost_connection(node, alive, is_silence):
    node.without_leader.add("a")
    node.shared._free_at = node.clock.monotonic() + (0.0 if alive else 10 * HELD_UP)
    node.publish("a", b"1")
    await node.clock.advance(3 * TIMEOUT)
    assert isinstance(node.errors[b"1"], BrokerSilentError) is is_silence
    assert isinstance(node.errors[b"1"], BrokerUnavailableError)


@pytest.mark.proves("broker/queue-leader-too-many")
async def test_queue_without_a_leader_holds_up_no_other(node):
    node.without_leader |= {"a", "b"}
    node.publish("a", b"1")
    node.publish("b", b"2")
    node.publish("c", b"3", b"4", b"5")
    await node.clock.settle()
    assert node.taken == [("c", b"3"), ("c", b"4"), ("c", b"5")]
    await node.clock.advance(TIMEOUT)
    assert set(node.errors) == {b"1", b"2"}


async def test_isolated_publishes_leave_half_of_the_channels_free(node, monkeypatch):
    """Messages without a free channel fail, together with those behind them. More would end the connection."""
    monkeypatch.setattr(isolation, "PLACE_TIMEOUT", 0.0)
    node.max_channels = 8
    bodies = numbered(40)
    node.without_leader |= {f"{number}" for number in range(20)}
    for number in range(20):
        node.publish(f"{number}", *bodies[2 * number : 2 * number + 2])
    await node.clock.settle()
    assert (set(node.errors), node.taken, len(node.channels)) == (set(bodies[8:]), [], 4)
    await node.clock.advance(TIMEOUT)
    assert {type(error) for error in node.errors.values()} == {BrokerSilentError}


async def test_messages_behind_one_that_is_not_confirmed_are_not_sent(node):
    """Else they would overtake it, if the queue had its leader again in between."""
    node.without_leader.add("a")
    node.publish("a", b"1", b"2", b"3")
    await node.clock.advance(TIMEOUT / 2)
    node.without_leader.clear()
    await node.clock.advance(TIMEOUT)
    assert ([*node.errors], node.taken) == ([b"1", b"2", b"3"], [])
    await node.clock.advance(HELD_UP)
    node.publish("a", b"1", b"2", b"3")
    await node.clock.settle()
    assert [body for _, body in node.taken] == [b"1", b"2", b"3"]


async def test_queue_that_loses_its_leader_under_load_gets_a_few_messages_at_most(node):
    """With 32 of them unconfirmed, RabbitMQ would hold up the whole connection. Repeats go on one channel of their
    own."""
    node.publish("a", b"first", b"second")
    await node.clock.settle()
    node.without_leader.add("a")
    node.publish("a", *numbered(10 * MAX_UNCONFIRMED))
    node.publish("b", b"3", b"4")
    await node.clock.settle()
    assert node.taken == [("a", b"first"), ("a", b"second"), ("b", b"3"), ("b", b"4")]
    await node.clock.advance(TIMEOUT)
    assert len(node.errors) == 10 * MAX_UNCONFIRMED
    assert set(node.shared.sent) & set(node.errors) == set(numbered(MAX_UNCONFIRMED))
    sent, opened = len(node.shared.sent), len(node.channels)
    for body in numbered(5):
        node.publish("a", body)
        await node.clock.advance(TIMEOUT)
    assert (len(node.shared.sent), len(node.channels)) == (sent, opened)


async def test_confirm_that_is_not_fresh_opens_the_shared_channel_for_nothing(node):
    for body in numbered(3):
        node.publish("a", body)
        await node.clock.advance(2 * FRESH)
    assert (node.shared.sent, len(node.channels), len(node.taken)) == ([], 1, 3)


async def test_refused_message_leaves_its_channel_to_the_next(node):
    node.refuses = True
    with pytest.raises(PublishRefusedError):
        await node.publisher.publish(Message(body=b"1"), exchange="", routing_key="a")
    node.refuses = False
    await node.publisher.publish(Message(body=b"2"), exchange="", routing_key="a")
    assert (node.taken, len(node.channels)) == ([("a", b"2")], 1)


async def test_isolated_publish_waits_while_an_alarm_blocks_the_connection(node):
    node.blocks_at_open = True
    node.publish("a", b"1")
    await node.clock.advance(10 * HELD_UP)
    assert (node.taken, node.errors) == ([], {})
    node.blocks_at_open = node.is_blocked = False
    node.unblocked.set()
    await node.clock.settle()
    assert node.taken == [("a", b"1")]


async def test_unneeded_channels_are_closed(node):
    node.without_leader.add("a")
    running = asyncio.create_task(node.publisher.run())
    node.publish("a", b"1")
    await node.clock.advance(TIMEOUT)
    for queue in map(str, range(SPARE + 5)):
        node.publish(queue, b"")
    await node.clock.advance(3 * FORGET_AFTER)
    assert sum(not channel.is_closed for channel in node.channels) <= SPARE
    assert (node.channels[0].is_closed, node.publisher._destinations._destinations) == (True, {})
    running.cancel()


@pytest.mark.proves("broker/queue-leader-too-many")
async def test_queue_that_confirms_nothing_holds_up_its_own_key_only(stack, clock, monkeypatch):
    publisher = stack.term._session.publisher
    publish, silent = publisher.publish, True

    async def publish_or_not(message, **where):
        if silent and where["routing_key"] == "a":
            raise SILENT
        await publish(message, **where)

    monkeypatch.setattr(publisher, "publish", publish_or_not)
    await stack.publish("a", b"1")
    await stack.publish("b", b"2")
    await clock.advance(2)
    assert (stack.orphans(), stack.waiting("b"), stack.task.done()) == ([b"1"], [b"2"], False)
    silent = False
    await clock.advance(10)
    assert (stack.orphans(), stack.waiting("a")) == ([], [b"1"])
