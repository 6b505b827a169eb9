"""Answers to direct reply-to addresses have a connection of their own, which an odd address may end."""

from __future__ import annotations

import pytest

from osrdyne.amqp import Connection, ConnectionOptions, Message
from osrdyne.amqp.direct_replies import DirectReplies, GuardedChannel, guarded_channel
from osrdyne.errors import AddressRefusedError, BrokerUnavailableError
from osrdyne.testing.amqp import FakeConnection
from osrdyne.testing.broker import Command, FakeBroker
from osrdyne.testing.clock import VirtualClock

FORGED, CALLER = "amq.rabbitmq.reply-to.forged", "amq.rabbitmq.reply-to.caller"


class Bench:
    """A broker that ends every connection that names the forged address."""

    def __init__(self) -> None:
        self.broker = FakeBroker(VirtualClock())
        self.broker.hook = self._end
        self.broker.declare_queue(CALLER, {})
        self.opened: list[FakeConnection] = []
        self.refuses_connections = False
        self.direct = DirectReplies(self.open)

    async def open(self) -> Connection:
        if self.refuses_connections:
            raise BrokerUnavailableError("The broker is away.")
        self.opened.append(FakeConnection(self.broker, ConnectionOptions("amqp://fake")))
        return self.opened[-1]

    async def _end(self, command: Command) -> None:
        if command.target == FORGED:
            self.opened[-1].cut(BrokerUnavailableError("INTERNAL_ERROR"))


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_forged_address_is_refused_and_costs_its_connection_only(bench: Bench) -> None:
    with pytest.raises(AddressRefusedError, match="forged"):
        await bench.direct.publish(Message(), FORGED)
    await bench.direct.publish(Message(b"x"), CALLER)
    assert (bench.broker.bodies(CALLER), len(bench.opened)) == ([b"x"], 2)


async def test_forged_address_on_an_old_connection_is_tried_once_more(bench: Bench) -> None:
    await bench.direct.publish(Message(b"x"), CALLER)
    with pytest.raises(AddressRefusedError):
        await bench.direct.publish(Message(), FORGED)
    assert len(bench.opened) == 2


async def test_answer_is_sent_again_when_its_connection_was_lost(bench: Bench) -> None:
    await bench.direct.publish(Message(b"1"), CALLER)
    bench.opened[0].cut()
    await bench.direct.publish(Message(b"2"), CALLER)
    assert bench.broker.bodies(CALLER) == [b"1", b"2"]


async def test_broker_that_is_away_is_no_fault_of_the_address(bench: Bench) -> None:
    bench.refuses_connections = True
    with pytest.raises(BrokerUnavailableError):
        await bench.direct.publish(Message(), CALLER)


@pytest.mark.parametrize(("address", "known"), [(CALLER, True), (CALLER + "2", False), (FORGED, False)])
async def test_question_for_an_address_harms_nobody(bench: Bench, address: str, known: bool) -> None:
    assert await bench.direct.knows(address) is known


async def test_callers_that_are_gone_cost_no_connection_each(bench: Bench) -> None:
    for number in range(3):
        assert not await bench.direct.knows(f"{CALLER}{number}")
    await bench.direct.publish(Message(b"x"), CALLER)
    assert (bench.broker.bodies(CALLER), len(bench.opened)) == ([b"x"], 1)


async def test_only_answers_to_direct_addresses_leave_the_channel(bench: Bench) -> None:
    connection = await bench.open()
    bench.broker.declare_queue("replies", {})
    guarded = GuardedChannel(await connection.channel(confirms=True), bench.direct)
    await guarded.publish(Message(b"1"), exchange="", routing_key="replies")
    assert (bench.broker.bodies("replies"), len(bench.opened)) == ([b"1"], 1)
    await guarded.publish(Message(b"2"), exchange="", routing_key=CALLER)
    assert (bench.broker.bodies(CALLER), len(bench.opened)) == ([b"2"], 2)


@pytest.mark.parametrize(("version", "connections"), [("3.10.8", 2), ("4.2.1", 2), ("4.3.0", 1), ("4.10.0", 1)])
async def test_version_that_takes_any_address_needs_no_second_connection_for_answers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, version: str, connections: int
) -> None:
    monkeypatch.setattr(FakeConnection, "server_version", version)
    guarded = await guarded_channel(await bench.open(), bench.open)
    await guarded.publish(Message(b"1"), exchange="", routing_key=CALLER)
    assert (bench.broker.bodies(CALLER), len(bench.opened)) == ([b"1"], connections)


async def test_question_is_never_asked_on_the_connection_of_requests(bench: Bench) -> None:
    """Also RabbitMQ 4.3 ends the connection that asks for a forged address."""
    requests = await bench.open()
    guarded = await guarded_channel(requests, bench.open)
    assert await guarded.knows(FORGED) is False
    assert not requests.is_closed
