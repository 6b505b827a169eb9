"""Connection and channel against a scripted broker in memory: notices, limits, and a broker that says nothing."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from aio_pika.tools import OneShotCallback
from pamqp import commands as spec
from scripted_broker import CHANNEL_MAX, PATIENCE, deliveries, passes
from structlog.testing import capture_logs

from osrdyne import amqp
from osrdyne.amqp import Channel, ConnectionOptions
from osrdyne.amqp.transport import FrameReader
from osrdyne.errors import BrokerSilentError, BrokerUnavailableError, PublishRefusedError

BLOCKED = spec.Connection.Blocked("low on memory")
LOST = spec.Connection.Close(320, "CONNECTION_FORCED", 0, 0)


@pytest.fixture
async def connection(broker):
    opened = await amqp.connect(ConnectionOptions("amqp://u@h", heartbeat=0, rpc_timeout=0.2))
    assert (opened.server_version, opened.max_channels) == ("4.9.0", CHANNEL_MAX)
    yield opened
    broker.silent = False
    await opened.close()


@pytest.fixture
async def channel(connection):
    return await connection.channel(confirms=True)


async def settled() -> None:
    await passes(20)


@pytest.mark.proves("broker/memory-disk-alarm")
@pytest.mark.parametrize("end", [spec.Connection.Unblocked(), LOST], ids=["withdrawn", "connection lost"])
async def test_block_is_logged_once_and_opens_no_channel(broker, connection, end):
    seen = [connection.is_blocked]
    with capture_logs() as logs:
        for _ in range(2):
            broker.send(BLOCKED, channel=0)
        await settled()
    assert [one["connection"] for one in logs if one["log_level"] == "warning"] == [connection.options.name]
    waiting = asyncio.create_task(connection.wait_unblocked())
    opening = asyncio.create_task(connection.channel())
    await settled()
    seen += [connection.is_blocked, waiting.done()]
    assert not any(isinstance(frame, spec.Channel.Open) for _, frame in broker.received)
    broker.send(end, channel=0)
    async with asyncio.timeout(PATIENCE):
        [opened] = await asyncio.gather(opening, return_exceptions=True)
    assert [*seen, connection.is_blocked] == [False, True, False, False]
    assert not isinstance(opened, BrokerSilentError)
    assert isinstance(opened, BrokerUnavailableError if end is LOST else Channel)
    if end is not LOST:
        await asyncio.wait_for(waiting, PATIENCE)


async def test_deliveries_before_the_end_of_a_consumer_are_handed_out(broker, channel):
    """The broker ends one, and the program another."""
    consumer = await channel.consume("q")
    broker.send(*deliveries(consumer.tag, b"1", b"2"), spec.Basic.Cancel(consumer.tag))
    assert [(await consumer.get()).body for _ in range(2)] == [b"1", b"2"]
    with pytest.raises(BrokerUnavailableError, match="consumer of q"):
        await consumer.get()
    another = await channel.consume("q")
    broker.deliver(another.tag, b"3", b"4")
    await channel.cancel(another)
    assert [delivery.body async for delivery in another] == [b"3", b"4"]


async def test_consumer_with_new_prefetch_keeps_the_order(broker, channel):
    consumer = await channel.consume("q", prefetch=2)
    broker.deliver(consumer.tag, b"1", b"2")
    await channel.take_more(consumer, prefetch=2)
    broker.deliver(consumer.tag, b"3")
    assert [(await consumer.get()).body for _ in range(3)] == [b"1", b"2", b"3"]


@pytest.mark.parametrize("later", range(15))
async def test_consumer_that_is_cancelled_while_it_gets_a_new_prefetch_stays_cancelled(broker, channel, later):
    """`later`: passes of the event loop from the new prefetch to the cancel."""
    consumer = await channel.consume("q", prefetch=2)
    taking = asyncio.create_task(channel.take_more(consumer, prefetch=2))
    await passes(later)
    await channel.cancel(consumer)
    await taking
    started = [frame.consumer_tag for _, frame in broker.received if isinstance(frame, spec.Basic.Consume)]
    order = [type(frame) for _, frame in broker.received if getattr(frame, "consumer_tag", None) == started[-1]]
    assert order[-1] is spec.Basic.Cancel


async def test_returned_messages_fail_alone_and_no_message_gets_an_id(broker, channel):
    """aiormq would invent ids, and lose a returned message if another in flight had its id."""
    ids = [None, None, "x", "x"]
    messages = [amqp.Message(message_id=name, headers={"h": 1}) for name in ids]
    publishes = [
        asyncio.create_task(channel.publish(one, exchange="", routing_key="q", mandatory=True)) for one in messages
    ]
    await settled()
    assert [one.properties.message_id for one in broker.published] == ids
    for number in (2, 4):
        broker.send(spec.Basic.Return(312, "NO_ROUTE", "", "q"), broker.published[number - 1])
    broker.send(spec.Basic.Ack(4, multiple=True))
    async with asyncio.timeout(PATIENCE):
        outcomes = await asyncio.gather(*publishes, return_exceptions=True)
    assert [isinstance(one, PublishRefusedError) for one in outcomes] == [False, True, False, True]


async def test_closed_channel_reports_the_reason_of_the_broker(broker, channel):
    consumer = await channel.consume("q")
    broker.close_channel(1, 406, "PRECONDITION_FAILED - unknown delivery tag 9")
    reason = await asyncio.wait_for(channel.wait_closed(), PATIENCE)
    assert "unknown delivery tag" in str(reason)
    with pytest.raises(BrokerUnavailableError, match="closed"):
        await consumer.get()


@pytest.mark.parametrize("what", ["channel", "connection"])
async def test_own_close_has_no_reason(connection, channel, what):
    closed = channel if what == "channel" else connection
    await closed.close()
    for one in (channel, closed):
        assert await asyncio.wait_for(one.wait_closed(), PATIENCE) is None


REQUESTS: dict[str, Callable[[Channel], Coroutine[Any, Any, Any]]] = {
    "declare queue": lambda channel: channel.declare_queue("q"),
    "declare exchange": lambda channel: channel.declare_exchange("x", "direct"),
    "bind queue": lambda channel: channel.bind_queue("q", "x"),
    "unbind queue": lambda channel: channel.unbind_queue("q", "x"),
    "bind exchange": lambda channel: channel.bind_exchange("x", "y"),
    "unbind exchange": lambda channel: channel.unbind_exchange("x", "y"),
    "delete queue": lambda channel: channel.delete_queue("q"),
    "consume": lambda channel: channel.consume("q"),
    "ping": lambda channel: channel.ping(),
    "get": lambda channel: channel.get("q"),
    "publish": lambda channel: channel.publish(amqp.Message(), exchange="", routing_key="q"),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_request_without_an_answer_is_given_up(broker, connection, channel, name):
    broker.silent = True
    for request in (REQUESTS[name](channel), connection.channel()):
        with pytest.raises(BrokerSilentError):
            await asyncio.wait_for(request, PATIENCE)
    await asyncio.wait_for(channel.close(), PATIENCE)
    assert channel.is_closed


async def test_close_ends_though_the_broker_is_silent(broker, monkeypatch):
    monkeypatch.setattr("osrdyne.amqp.connection._CLOSE_TIMEOUT", 0.05)
    connection = await amqp.connect(ConnectionOptions("amqp://u@h", heartbeat=7200))
    broker.silent = True
    broker.protocol.pause_writing()  # aiormq waits three heartbeats for it to end
    async with asyncio.timeout(PATIENCE):
        await connection.close()
        assert await connection.wait_closed() is None
    assert connection.is_closed


async def test_channels_that_are_closed_leave_nothing_behind(broker, connection):
    """aio-pika observes the connection for each channel: https://github.com/mosquito/aio-pika/issues/490."""

    def observers():
        gc.collect()
        return sum(isinstance(one, OneShotCallback) for one in gc.get_objects())

    before = observers()
    for number in range(40):
        channel = await connection.channel()
        if number % 2:
            await channel.close()
        else:
            [opened] = broker.channels
            broker.close_channel(opened, 404, "NOT_FOUND")
            await channel.wait_closed()
        await settled()
        del channel
    assert observers() - before < 5
    readers = [one for one in gc.get_objects() if isinstance(one, FrameReader)]
    assert {one.login for one in readers} == {None}, "bytes of the log-in, and all that follow, are kept"


async def test_lost_connection_is_collected_without_a_task(broker):
    connection = await amqp.connect(ConnectionOptions("amqp://u@h", heartbeat=0))
    broker.send(LOST, channel=0)
    assert "CONNECTION_FORCED" in str(await asyncio.wait_for(connection.wait_closed(), PATIENCE))
    await settled()
    lost = weakref.ref(connection._connection)
    before = asyncio.all_tasks()
    del connection
    gc.collect()
    assert lost() is None
    assert asyncio.all_tasks() == before


async def test_cancelled_connect_leaves_no_socket(broker):
    broker.silent = True
    connecting = asyncio.create_task(amqp.connect(ConnectionOptions("amqp://u@h", heartbeat=0)))
    await settled()
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert broker.is_closing()
