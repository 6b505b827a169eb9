"""The end of a channel, in every interleaving: no frame follows its close, and numbers of channels are not confused.

The broker here is a script in the same event loop. It has RabbitMQ's rule (broker: channel-ends): any frame but
`channel.open` on a channel that is not open closes the connection (504), and so does a second `channel.open`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from enum import Enum
from typing import Any

import pytest
from pamqp import commands, frame, header
from pamqp.base import Frame

from osrdyne import amqp
from osrdyne.amqp import Channel, Connection, ConnectionOptions, Message
from osrdyne.errors import BrokerError, BrokerNotFoundError, BrokerUnavailableError

PASSES = 25
"""Passes of the event loop within which a question and the end of its channel are over."""
PATIENCE = 120.0
CHANNEL_MAX = 50
SERVER_PROPERTIES: dict[str, Any] = {
    "capabilities": {"publisher_confirms": True, "basic.nack": True, "consumer_cancel_notify": True}
}
NO_REPLY = {"Basic.Publish", "Basic.Ack", "Basic.Nack", "Basic.Reject"}


class State(Enum):
    OPEN = "open"
    CLOSING = "closed by the broker, and not yet confirmed by the client"


class ScriptedBroker(asyncio.Transport):
    """Both ends of a connection in one object: what the client writes is answered in the next pass of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: asyncio.Protocol
        self.channels: dict[int, State] = {}
        self.received: list[tuple[int, str]] = []
        self.violations: list[tuple[int, str]] = []
        self.asked: list[int] = []
        """Channels on which a passive declaration waits for `refuse`."""
        self.reads = True
        """False: what the client writes is on its way."""
        self.holds_close_ok = False
        self._held: list[int] = []
        self._unread = b""
        self._closing = False

    # --- what the client's side of the socket calls

    def write(self, data: Any) -> None:
        self._unread += bytes(data)
        if self.reads:
            self.read()

    def read(self) -> None:
        self.reads = True
        while self._unread:
            size, number, read = frame.unmarshal(self._unread)
            self._unread = self._unread[size:]
            self._receive(number, read)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    # --- the broker

    def _receive(self, number: int, read: Any) -> None:
        if isinstance(read, header.ProtocolHeader):
            self._send(0, commands.Connection.Start(mechanisms="PLAIN", server_properties=SERVER_PROPERTIES))
        elif number == 0:
            self._receive_of_connection(read)
        elif isinstance(read, Frame):
            self.received.append((number, read.name))
            self._receive_of_channel(number, read)

    def _receive_of_connection(self, read: Any) -> None:
        match read:
            case commands.Connection.StartOk():
                self._send(0, commands.Connection.Tune(CHANNEL_MAX, 131_072, 60))
            case commands.Connection.Open():
                self._send(0, commands.Connection.OpenOk())
            case commands.Connection.Close():
                self._send(0, commands.Connection.CloseOk())

    def _receive_of_channel(self, number: int, read: Frame) -> None:
        state = self.channels.get(number)
        match state, read:
            case None, commands.Channel.Open():
                self.channels[number] = State.OPEN
                self._send(number, commands.Channel.OpenOk())
            case (None, _) | (_, commands.Channel.Open()):
                text = "second 'channel.open' seen" if state else "expected 'channel.open'"
                self.violations.append((number, read.name))
                self._send(0, commands.Connection.Close(504, f"CHANNEL_ERROR - {text}", 0, 0))
            case State.OPEN, commands.Channel.Close() if self.holds_close_ok:
                self._held.append(number)
                del self.channels[number]
            case State.OPEN, commands.Channel.Close():
                del self.channels[number]
                self._send(number, commands.Channel.CloseOk())
            case State.OPEN, commands.Queue.Declare(passive=True):
                self.asked.append(number)
            case State.CLOSING, commands.Channel.CloseOk():
                del self.channels[number]
            case State.CLOSING, commands.Channel.Close():
                self._held.append(number)
                if not self.holds_close_ok:
                    self.release_close_ok()
            case State.OPEN, _ if read.name not in NO_REPLY and not getattr(read, "nowait", False):
                self._send(number, _answer(read))

    def refuse(self, number: int) -> None:
        """Close a channel: the queue that was asked for does not exist."""
        self.asked.remove(number)
        if self.channels.get(number) is State.OPEN:
            self.channels[number] = State.CLOSING
            self._send(number, commands.Channel.Close(404, "NOT_FOUND - no queue", 50, 10))

    def release_close_ok(self) -> None:
        self.holds_close_ok = False
        while self._held:
            self._send(self._held.pop(0), commands.Channel.CloseOk())

    def _send(self, number: int, method: Frame) -> None:
        asyncio.get_running_loop().call_soon(self._deliver, frame.marshal(method, number))

    def _deliver(self, data: bytes) -> None:
        if not self._closing:
            self.protocol.data_received(data)


def _answer(read: Frame) -> Frame:
    match read:
        case commands.Confirm.Select():
            return commands.Confirm.SelectOk()
        case commands.Basic.Qos():
            return commands.Basic.QosOk()
    raise AssertionError(f"the script has no answer to {read.name}")


@pytest.fixture
async def broker(monkeypatch: pytest.MonkeyPatch) -> ScriptedBroker:
    scripted = ScriptedBroker()

    async def create_connection(factory: Callable[[], Any], *_: Any, **__: Any) -> tuple[ScriptedBroker, Any]:
        scripted.protocol = factory()
        scripted.protocol.connection_made(scripted)
        return scripted, scripted.protocol

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", create_connection)
    return scripted


@pytest.fixture
async def connection(broker: ScriptedBroker) -> AsyncIterator[Connection]:
    opened = await amqp.connect(ConnectionOptions("amqp://guest:guest@scripted/", heartbeat=1))
    yield opened
    await opened.close()


async def passes(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0)


async def ended(*tasks: asyncio.Task[Any]) -> list[Any]:
    async with asyncio.timeout(PATIENCE):
        return await asyncio.gather(*tasks, return_exceptions=True)


async def asked(channel: Channel, broker: ScriptedBroker) -> asyncio.Task[Any]:
    """A question that the broker has read and not answered."""
    question = asyncio.create_task(channel.declare_queue("missing", passive=True))
    await until(lambda: broker.asked)
    return question


async def assert_usable(connection: Connection, broker: ScriptedBroker) -> None:
    """Both sides agree on what is open: another channel opens, and no channel is left behind."""
    assert broker.violations == []
    async with asyncio.timeout(PATIENCE):
        channel = await connection.channel()
        await channel.ping()
        await channel.close()
        await until(lambda: not broker.channels)


@pytest.mark.parametrize("later", range(PASSES))
@pytest.mark.proves("broker/call-cancelled-times-out")
async def test_question_cancelled_while_its_channel_is_being_closed(
    broker: ScriptedBroker, connection: Connection, later: int
) -> None:
    """`later`: passes of the loop from the broker's close to the cancellation."""
    channel = await connection.channel()
    question = await asked(channel, broker)
    broker.refuse(broker.asked[0])
    await passes(later)
    question.cancel()
    (outcome,) = await ended(question)
    assert isinstance(outcome, asyncio.CancelledError | BrokerNotFoundError)
    await channel.close()
    await assert_usable(connection, broker)


@pytest.mark.parametrize("earlier", range(PASSES))
async def test_broker_closes_a_channel_whose_question_was_cancelled(
    broker: ScriptedBroker, connection: Connection, earlier: int
) -> None:
    """Both closes cross; `earlier`: passes from the cancellation to the broker's close."""
    channel = await connection.channel()
    question = await asked(channel, broker)
    question.cancel()
    closing = asyncio.create_task(channel.close())
    await passes(earlier)
    broker.refuse(broker.asked[0])
    await ended(question, closing)
    await assert_usable(connection, broker)


async def test_answer_to_a_close_that_comes_after_the_next_channel_was_opened(
    broker: ScriptedBroker, connection: Connection
) -> None:
    """Both closes cross. The broker has the answer to ours, and so the number is free; its own answer is on its way."""
    channel = await connection.channel()
    question = await asked(channel, broker)
    broker.reads, broker.holds_close_ok = False, True
    question.cancel()
    await ended(question)
    await channel.close()
    broker.refuse(broker.asked[0])
    broker.read()
    await until(lambda: not broker.channels)
    assert [method for _, method in broker.received].count("Channel.Close") == 1
    following = await connection.channel()
    broker.release_close_ok()
    await following.ping()
    assert not following.is_closed
    await following.close()
    await assert_usable(connection, broker)


@pytest.mark.parametrize("later", range(PASSES))
async def test_next_channel_is_opened_while_the_last_one_ends(
    broker: ScriptedBroker, connection: Connection, later: int
) -> None:
    """The stock of spare channels does so; `later`: passes from the broker's close to the opening."""
    for cancelled_after in range(PASSES):
        channel = await connection.channel()
        question = await asked(channel, broker)
        broker.refuse(broker.asked[0])
        await passes(min(later, cancelled_after))
        if cancelled_after < later:
            question.cancel()
            await passes(later - cancelled_after)
        opening = asyncio.create_task(connection.channel())
        if cancelled_after >= later:
            await passes(cancelled_after - later)
            question.cancel()
        await ended(question)
        await channel.close()
        (opened,) = await ended(opening)
        assert isinstance(opened, Channel), opened
        await opened.ping()
        await opened.close()
    await assert_usable(connection, broker)


@pytest.mark.parametrize("later", range(PASSES))
@pytest.mark.proves("broker/call-cancelled-times-out")
async def test_close_that_is_cancelled(broker: ScriptedBroker, connection: Connection, later: int) -> None:
    channel = await connection.channel()
    closing = asyncio.create_task(channel.close())
    await passes(later)
    closing.cancel()
    await ended(closing)
    await channel.close()
    await assert_usable(connection, broker)


@pytest.mark.proves("broker/call-cancelled-times-out")
async def test_close_that_the_broker_confirms_late(broker: ScriptedBroker, connection: Connection) -> None:
    """aiormq waits one heartbeat for the answer, and sends its close again after that."""
    channel = await connection.channel()
    broker.holds_close_ok = True
    async with asyncio.timeout(PATIENCE):
        await channel.close()
    broker.release_close_ok()
    await assert_usable(connection, broker)


@pytest.mark.parametrize("later", range(PASSES))
async def test_messages_published_while_the_channel_is_being_closed(
    broker: ScriptedBroker, connection: Connection, later: int
) -> None:
    channel = await connection.channel(confirms=True)
    question = await asked(channel, broker)
    broker.refuse(broker.asked[0])
    await passes(later)
    publishing = [
        asyncio.create_task(channel.publish(Message(b"x"), exchange="", routing_key=f"q{number}"))
        for number in range(20)
    ]
    outcomes = await ended(*publishing)
    assert all(isinstance(outcome, BrokerError) for outcome in outcomes), outcomes
    await ended(question)
    await assert_usable(connection, broker)


@pytest.mark.parametrize("later", range(PASSES))
async def test_acknowledgements_sent_while_the_channel_is_being_closed(
    broker: ScriptedBroker, connection: Connection, later: int
) -> None:
    channel = await connection.channel()
    question = await asked(channel, broker)
    broker.refuse(broker.asked[0])
    await passes(later)
    await ended(*(asyncio.create_task(channel.ack(tag)) for tag in range(1, 21)))
    await ended(question)
    await assert_usable(connection, broker)


async def test_many_channels_that_the_broker_closes_at_once(broker: ScriptedBroker, connection: Connection) -> None:
    """More than aiormq's queue of frames holds."""
    channels = [await connection.channel() for _ in range(30)]
    questions = [asyncio.create_task(channel.declare_queue("missing", passive=True)) for channel in channels]
    await until(lambda: len(broker.asked) == len(channels))
    for number in list(broker.asked):
        broker.refuse(number)
    assert all(isinstance(outcome, BrokerNotFoundError) for outcome in await ended(*questions))
    await assert_usable(connection, broker)


async def test_number_that_has_just_become_free_is_taken_last(broker: ScriptedBroker, connection: Connection) -> None:
    kept = await connection.channel()
    for _ in range(3 * CHANNEL_MAX):
        await (await connection.channel()).close()
    numbers = [number for number, method in broker.received if method == "Channel.Open"]
    assert numbers[:CHANNEL_MAX] == list(range(1, CHANNEL_MAX + 1))
    assert numbers[CHANNEL_MAX:] == [*range(2, CHANNEL_MAX + 1)] * 2 + [2, 3, 4]
    assert not kept.is_closed


async def test_no_more_channels_than_the_broker_allows(broker: ScriptedBroker, connection: Connection) -> None:
    for _ in range(CHANNEL_MAX):
        await connection.channel()
    with pytest.raises(BrokerUnavailableError, match=f"the {CHANNEL_MAX} channels"):
        await connection.channel()
    assert broker.violations == []


@pytest.mark.parametrize("later", range(PASSES))
async def test_opening_that_is_cancelled(broker: ScriptedBroker, connection: Connection, later: int) -> None:
    opening = asyncio.create_task(connection.channel())
    await passes(later)
    opening.cancel()
    (outcome,) = await ended(opening)
    if isinstance(outcome, Channel):
        await outcome.close()
    another = await connection.channel()
    await another.ping()
    await another.close()
    assert broker.violations == []
