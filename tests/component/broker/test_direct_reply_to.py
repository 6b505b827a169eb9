"""Answers to direct reply-to addresses have a connection of their own, which an odd address may end."""

import asyncio

import pytest
from aiormq.exceptions import ChannelAccessRefused

from osrdyne.amqp import Connection, ConnectionOptions, Message
from osrdyne.amqp.direct_reply_to import CONNECT_RETRY, PATIENCE, DirectReplies, guarded_channel
from osrdyne.broker.publishing.publisher import LeaderPublisher
from osrdyne.errors import (
    AddressRefusedError,
    BrokerAccessError,
    BrokerError,
    BrokerInternalError,
    BrokerUnavailableError,
    PublishRefusedError,
)
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeConnection
from osrdyne.testing.fakes.broker import Command, FakeBroker

FORGED, CALLER = "amq.rabbitmq.reply-to.forged", "amq.rabbitmq.reply-to.caller"


class Bench:
    """A broker that ends every connection that names the forged address."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.broker = FakeBroker(self.clock)
        self.broker.hook = self._end
        self.broker.declare_queue(CALLER, {})
        self.opened: list[FakeConnection] = []
        self.losses = 0
        self.refusal: BrokerError | None = None
        self.direct = DirectReplies(self.open, clock=self.clock)

    def send(self, *bodies: bytes, to: str = CALLER) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.direct.publish(Message(body), to)) for body in bodies]

    @property
    def received(self) -> list[bytes]:
        return self.broker.bodies(CALLER)

    async def open(self) -> Connection:
        if self.refusal is not None:
            raise self.refusal
        self.opened.append(FakeConnection(self.broker, ConnectionOptions("amqp://fake")))
        return self.opened[-1]

    async def _end(self, command: Command) -> None:
        if command == ("publish", CALLER, False) and self.losses:
            self.losses -= 1
            self.opened[-1].cut()
        if command.target == FORGED:
            self.opened[-1].cut()
            raise BrokerInternalError("INTERNAL_ERROR")


@pytest.fixture
def bench():
    return Bench()


@pytest.mark.proves("hostile/forged-direct-reply-address")
@pytest.mark.parametrize("is_old", [False, True], ids=["new connection", "old connection"])
async def test_forged_address_is_tried_once_and_costs_its_connection_only(bench, is_old):
    before = [b"x"] if is_old else []
    for body in before:
        await bench.direct.publish(Message(body), CALLER)
    with pytest.raises(AddressRefusedError, match="forged"):
        await bench.direct.publish(Message(), FORGED)
    assert len(bench.opened) == 1
    await bench.direct.publish(Message(b"x"), CALLER)
    assert (bench.received, len(bench.opened)) == ([*before, b"x"], 2)


async def test_answer_is_sent_again_when_its_connection_is_lost_before_or_while_it_answers(bench):
    await bench.direct.publish(Message(b"1"), CALLER)
    bench.opened[0].cut()
    bench.losses = 3
    [sending] = bench.send(b"2")
    await bench.clock.advance(10.0)
    assert (sending.done(), bench.received, len(bench.opened)) == (True, [b"1", b"2"], 5)


async def test_answers_that_a_forged_address_takes_along_are_sent_again(bench):
    await bench.direct.publish(Message(b"0"), CALLER)

    async def end_while_they_are_under_way(command):
        if command == ("publish", CALLER, False) and len(bench.opened) == 1:
            await bench.clock.sleep(1.0)
        await bench._end(command)

    bench.broker.hook = end_while_they_are_under_way
    sending = bench.send(b"1", b"2", b"3")
    [forged] = bench.send(b"", to=FORGED)
    await bench.clock.advance(30.0)
    assert isinstance(forged.exception(), AddressRefusedError)
    assert all(sent.done() and sent.exception() is None for sent in sending)
    assert bench.received == [b"0", b"1", b"2", b"3"]


@pytest.mark.proves("broker/node-leaves-cluster-rabbitmq")
async def test_address_that_becomes_invalid_is_refused_and_not_another_one_in_flight(bench):
    """The node of a client leaves the cluster while the first reply to another client is in flight."""
    left = f"{CALLER}-of-a-node-that-left"
    bench.broker.declare_queue(left, {})
    await bench.direct.publish(Message(), left)

    async def end_while_the_first_reply_is_in_flight(command):
        if command == ("publish", CALLER, False) and len(bench.opened) == 1:
            await bench.clock.sleep(2.0)
            raise BrokerInternalError("INTERNAL_ERROR")  # as every publish in flight gets it
        if command == ("publish", left, False):
            await bench.clock.sleep(1.0)
            bench.opened[-1].cut()
            raise BrokerInternalError("INTERNAL_ERROR")

    bench.broker.hook = end_while_the_first_reply_is_in_flight
    [first] = bench.send(b"x")
    [invalid] = bench.send(b"", to=left)
    await bench.clock.advance(30.0)
    assert isinstance(invalid.exception(), AddressRefusedError)
    assert (first.exception(), bench.received) == (None, [b"x"])


@pytest.mark.proves("broker/rabbitmq-4-3-refuses")
async def test_answers_fail_together_when_connections_are_refused_for_too_long(bench):
    """No connection is opened before the next attempt is due."""
    attempts = []

    async def refuse():
        attempts.append(bench.clock.monotonic())
        raise BrokerUnavailableError("away")

    bench.direct = DirectReplies(refuse, clock=bench.clock)
    sending = bench.send(*[b"x"] * 100)
    await bench.clock.advance(PATIENCE)
    assert {type(sent.exception()) for sent in sending} == {PublishRefusedError}
    assert len(attempts) == len(set(attempts)) < 30


@pytest.mark.parametrize("refusal", [BrokerUnavailableError("away"), BrokerAccessError("too many connections")])
@pytest.mark.proves("broker/rabbitmq-4-3-refuses")
async def test_answer_waits_while_connections_are_refused(bench, refusal):
    bench.refusal = refusal
    [sending] = bench.send(b"x")
    await bench.clock.advance(PATIENCE / 2)
    bench.refusal = None
    await bench.clock.advance(PATIENCE / 2)
    assert (sending.done(), bench.received) == (True, [b"x"])


async def test_question_does_not_wait_for_a_connection(bench):
    bench.refusal = BrokerUnavailableError("away")
    [sending] = bench.send(b"x")
    await bench.clock.advance(1.0)
    with pytest.raises(BrokerUnavailableError):
        await bench.direct.has_consumer(CALLER)
    sending.cancel()
    bench.refusal = None
    await bench.clock.advance(CONNECT_RETRY.maximum * 2)
    assert await bench.direct.has_consumer(CALLER)


async def test_question_for_an_address_does_no_harm(bench):
    """It is never asked on the connection of requests: also RabbitMQ 4.3 ends one that asks for a forged address."""
    requests = await bench.open()
    guarded = await guarded_channel(requests, bench.open, clock=bench.clock)
    addresses = (CALLER, f"{CALLER}2", f"{CALLER}3")
    assert [await guarded.has_consumer(address) for address in addresses] == [True, False, False]
    assert len(bench.opened) == 2, "an absent caller costs no connection"
    assert await guarded.has_consumer(FORGED) is False
    assert not requests.is_closed


@pytest.mark.parametrize(("version", "connections"), [("3.10.8", 2), ("4.2.1", 2), ("4.3.0", 1), ("4.10.0", 1)])
async def test_version_that_takes_any_address_needs_no_second_connection_for_answers(
    bench, monkeypatch, version, connections
):
    monkeypatch.setattr(FakeConnection, "server_version", version)
    guarded = await guarded_channel(await bench.open(), bench.open, clock=bench.clock)
    await guarded.publish(Message(b"1"), exchange="", routing_key=CALLER)
    assert (bench.received, len(bench.opened)) == ([b"1"], connections)


async def test_refusal_of_another_publish_costs_the_channel_and_not_the_connection(bench):
    """RabbitMQ reports it to one of the publishes in flight. The others find a closed channel."""
    connection = await bench.open()
    guarded = await guarded_channel(connection, bench.open, clock=bench.clock, reopens=True)
    closed = asyncio.create_task(guarded.wait_closed())
    bench.broker.declare_queue("replies", {})

    async def refuse(command):
        if command.name != "publish":
            return
        bench.opened[-1].channels[-1].end(ChannelAccessRefused(None, None))
        raise BrokerUnavailableError("closed")

    bench.broker.hook, end = refuse, bench.broker.hook
    for _ in range(2):
        with pytest.raises(BrokerAccessError):
            await guarded.publish(Message(b"1"), exchange="", routing_key="replies")
    bench.broker.hook = end
    await guarded.publish(Message(b"1"), exchange="", routing_key="replies")
    assert (bench.broker.bodies("replies"), closed.done(), connection.is_closed) == ([b"1"], False, False)
    closed.cancel()


@pytest.mark.proves("requests/reply-queue-full")
async def test_refused_answer_fails_no_other_publish_of_the_leader(bench):
    """They are in flight together, on channels that both destinations share with others."""
    connection, broker = await bench.open(), bench.broker
    publisher = await LeaderPublisher.open(connection, open_another=bench.open, clock=bench.clock)
    closed = asyncio.create_task(publisher.wait_closed())
    for name in ("control", "replies"):
        broker.declare_queue(name, {})
    broker.declare_exchange("control", "fanout", {})
    broker.bind("control", "control", "")

    async def publish(exchange: str, routing_key: str) -> None:
        await publisher.publish(Message(b"1"), exchange=exchange, routing_key=routing_key)

    async def refuse(command):
        if command == ("publish", "replies", False):
            connection.channels[0].end(ChannelAccessRefused(None, None))
            raise BrokerUnavailableError("closed")
        if command == ("publish", "control", False):
            await refused.wait()

    refused = asyncio.Event()
    for destination in (("control", ""), ("", "replies")):
        await publish(*destination)  # only destinations with a confirm share a channel
    broker.hook, end = refuse, broker.hook
    cancel = asyncio.create_task(publish("control", ""))
    await bench.clock.settle()
    with pytest.raises(BrokerAccessError):
        await publish("", "replies")
    refused.set()
    await cancel
    broker.hook = end
    await publish("", "replies")
    assert (broker.bodies("control"), broker.bodies("replies"), closed.done()) == ([b"1"] * 2, [b"1"] * 2, False)
    closed.cancel()
