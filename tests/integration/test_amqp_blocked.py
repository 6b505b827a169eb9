"""Publishing while RabbitMQ blocks publishers: a memory alarm on a node of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from rabbitmqctl import rabbitmqctl

from osrdyne import amqp
from osrdyne.amqp import Channel, Connection, ConnectionOptions, Message
from osrdyne.broker.embedded import EmbeddedBroker
from osrdyne.errors import BrokerUnavailableError

RPC_TIMEOUT = 0.5


@asynccontextmanager
async def alarm(broker: EmbeddedBroker) -> AsyncIterator[None]:
    """The node believes that it has no memory left."""
    await rabbitmqctl(broker, "set_vm_memory_high_watermark", "absolute", "1")
    yield
    await rabbitmqctl(broker, "set_vm_memory_high_watermark", "0.4")


@pytest.fixture
async def blockable() -> AsyncIterator[EmbeddedBroker]:
    async with EmbeddedBroker() as broker:
        yield broker


@pytest.fixture
async def publisher(blockable: EmbeddedBroker) -> AsyncIterator[tuple[Connection, Channel]]:
    connection = await amqp.connect(ConnectionOptions(uri=blockable.amqp_uri, rpc_timeout=RPC_TIMEOUT))
    channel = await connection.channel(confirms=True)
    await channel.declare_queue("q", arguments={"x-queue-type": "quorum"})
    yield connection, channel
    await connection.close()


async def test_publish_waits_as_long_as_the_broker_blocks_and_no_time_out_runs(
    blockable: EmbeddedBroker, publisher: tuple[Connection, Channel]
) -> None:
    connection, channel = publisher
    async with alarm(blockable):
        publishing = asyncio.create_task(channel.publish(Message(b"1"), exchange="", routing_key="q", mandatory=True))
        await asyncio.wait({publishing}, timeout=4 * RPC_TIMEOUT)
        assert not publishing.done()
        assert connection.is_blocked
        unblocked = asyncio.create_task(connection.wait_unblocked())
    async with asyncio.timeout(30):
        await publishing
        await unblocked
    assert (await channel.declare_queue("q", passive=True)).ready == 1


async def test_blocked_connection_can_be_closed_and_ends_what_waits(
    blockable: EmbeddedBroker, publisher: tuple[Connection, Channel]
) -> None:
    connection, channel = publisher
    async with alarm(blockable):
        publishing = asyncio.create_task(channel.publish(Message(b"2"), exchange="", routing_key="q"))
        await asyncio.wait({publishing}, timeout=2 * RPC_TIMEOUT)
        unblocked = asyncio.create_task(connection.wait_unblocked())
        async with asyncio.timeout(10):
            await connection.close()
            await unblocked
        with pytest.raises(BrokerUnavailableError):
            await publishing
