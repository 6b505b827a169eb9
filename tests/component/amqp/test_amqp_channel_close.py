"""The end of a channel, in every interleaving: no frame follows its close, and numbers of channels are not confused."""

import asyncio
from typing import Any

import pytest
from pamqp import commands
from scripted_broker import CHANNEL_MAX, PATIENCE, ScriptedBroker, passes, until

from osrdyne import amqp
from osrdyne.amqp import Channel, Connection, ConnectionOptions, Message
from osrdyne.errors import BrokerError, BrokerNotFoundError, BrokerUnavailableError

PASSES = 25
"""Passes of the event loop within which a question and the end of its channel are over."""
at_every_pass = pytest.mark.parametrize("later", range(PASSES))


@pytest.fixture
async def connection(broker):
    opened = await amqp.connect(ConnectionOptions("amqp://guest:guest@scripted/", heartbeat=1))
    yield opened
    await opened.close()


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


@pytest.mark.parametrize("earlier", range(PASSES))
async def test_close_crosses_that_of_the_broker(broker, connection, earlier):
    """Both closes cross; `earlier`: passes from the cancellation to the broker's close."""
    channel = await connection.channel()
    question = await asked(channel, broker)
    question.cancel()
    closing = asyncio.create_task(channel.close())
    await passes(earlier)
    broker.refuse(broker.asked[0])
    await ended(question, closing)
    await assert_usable(connection, broker)


async def test_answer_to_a_close_after_the_next_channel_was_opened(broker, connection):
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
    assert sum(isinstance(method, commands.Channel.Close) for _, method in broker.received) == 1
    following = await connection.channel()
    broker.release_close_ok()
    await following.ping()
    assert not following.is_closed
    await following.close()
    await assert_usable(connection, broker)


@at_every_pass
@pytest.mark.proves("broker/call-cancelled-times-out")
async def test_question_is_cancelled_and_the_next_channel_opened_while_the_last_one_ends(broker, connection, later):
    """As the stock of spare channels does; `later`: passes from the broker's close to the opening."""
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
        (outcome,) = await ended(question)
        assert isinstance(outcome, asyncio.CancelledError | BrokerNotFoundError)
        await channel.close()
        (opened,) = await ended(opening)
        assert isinstance(opened, Channel), opened
        await opened.ping()
        await opened.close()
    await assert_usable(connection, broker)


@at_every_pass
@pytest.mark.proves("broker/call-cancelled-times-out")
async def test_close_that_is_cancelled(broker, connection, later):
    channel = await connection.channel()
    closing = asyncio.create_task(channel.close())
    await passes(later)
    closing.cancel()
    await ended(closing)
    await channel.close()
    await assert_usable(connection, broker)


@pytest.mark.proves("broker/call-cancelled-times-out")
async def test_close_that_the_broker_confirms_late(broker, connection):
    """aiormq waits one heartbeat for the answer, and sends its close again after that."""
    channel = await connection.channel()
    broker.holds_close_ok = True
    async with asyncio.timeout(PATIENCE):
        await channel.close()
    broker.release_close_ok()
    await assert_usable(connection, broker)


@at_every_pass
async def test_channel_is_used_while_it_closes(broker, connection, later):
    """It publishes messages and acknowledges deliveries."""
    channel = await connection.channel(confirms=True)
    question = await asked(channel, broker)
    broker.refuse(broker.asked[0])
    await passes(later)
    publishing = [
        asyncio.create_task(channel.publish(Message(b"x"), exchange="", routing_key=f"q{number}"))
        for number in range(20)
    ]
    acknowledging = [asyncio.create_task(channel.ack(tag)) for tag in range(1, 21)]
    outcomes = await ended(*publishing)
    assert all(isinstance(outcome, BrokerError) for outcome in outcomes), outcomes
    await ended(question, *acknowledging)
    await assert_usable(connection, broker)


async def test_many_channels_that_the_broker_closes_at_once(broker, connection):
    """More than aiormq's queue of frames holds."""
    channels = [await connection.channel() for _ in range(30)]
    questions = [asyncio.create_task(channel.declare_queue("missing", passive=True)) for channel in channels]
    await until(lambda: len(broker.asked) == len(channels))
    for number in list(broker.asked):
        broker.refuse(number)
    assert all(isinstance(outcome, BrokerNotFoundError) for outcome in await ended(*questions))
    await assert_usable(connection, broker)


async def test_channels_are_numbered_in_turn_up_to_the_limit(broker, connection):
    kept = await connection.channel()
    for _ in range(3 * CHANNEL_MAX):
        await (await connection.channel()).close()
    numbers = [number for number, method in broker.received if isinstance(method, commands.Channel.Open)]
    assert numbers[:CHANNEL_MAX] == list(range(1, CHANNEL_MAX + 1))
    assert numbers[CHANNEL_MAX:] == [*range(2, CHANNEL_MAX + 1)] * 2 + [2, 3, 4]
    assert not kept.is_closed
    for _ in range(CHANNEL_MAX - 1):
        await connection.channel()
    with pytest.raises(BrokerUnavailableError, match=str(CHANNEL_MAX)):
        await connection.channel()
    assert broker.violations == []


@at_every_pass
async def test_opening_that_is_cancelled(broker, connection, later):
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
