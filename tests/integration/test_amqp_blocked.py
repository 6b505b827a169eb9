"""Publishing while RabbitMQ blocks publishers: a memory alarm on a node of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from rabbitmqctl import rabbitmqctl

from osrdyne import amqp
from osrdyne.amqp import Channel, Connection, ConnectionOptions, Message
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.errors import BrokerUnavailableError

pytestmark = pytest.mark.usefixtures("processes")

RPC_TIMEOUT = 3.0
"""Of the publishing connection, which waits longer than that; it is opened and declares with the ordinary one."""
PATIENCE = 120.0


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
    patient = await amqp.connect(ConnectionOptions(uri=blockable.amqp_uri, rpc_timeout=PATIENCE))
    await (await patient.channel()).declare_queue("q", arguments={"x-queue-type": "quorum"})
    await patient.close()
    connection = await amqp.connect(ConnectionOptions(uri=blockable.amqp_uri, rpc_timeout=RPC_TIMEOUT))
    yield connection, await connection.channel(confirms=True)
    await connection.close()


async def publish_until_blocked(connection: Connection, channel: Channel) -> tuple[asyncio.Task[None], int]:
    """A publish that waits, and how many were taken before it: the alarm reaches the connection a little later."""
    taken = 0
    while True:
        publishing = asyncio.create_task(channel.publish(Message(b"x"), exchange="", routing_key="q", mandatory=True))
        while not (publishing.done() or connection.is_blocked):
            await asyncio.wait({publishing}, timeout=0.05)
        if not publishing.done():
            return publishing, taken
        await publishing
        taken += 1


@pytest.mark.nightly
@pytest.mark.proves("broker/memory-disk-alarm")
async def test_publish_waits_as_long_as_the_broker_blocks_and_no_time_out_runs(
    blockable: EmbeddedBroker, publisher: tuple[Connection, Channel]
) -> None:
    """And a connection that is blocked for good can be closed, which ends what waits."""
    connection, channel = publisher
    async with alarm(blockable):
        publishing, taken = await publish_until_blocked(connection, channel)
        await asyncio.wait({publishing}, timeout=1.5 * RPC_TIMEOUT)
        assert not publishing.done()
        unblocked = asyncio.create_task(connection.wait_unblocked())
    async with asyncio.timeout(PATIENCE):
        await publishing
        await unblocked
    assert (await channel.declare_queue("q", passive=True)).ready == taken + 1
    async with alarm(blockable):
        publishing, _ = await publish_until_blocked(connection, channel)
        unblocked = asyncio.create_task(connection.wait_unblocked())
        async with asyncio.timeout(PATIENCE):
            await connection.close()
            await unblocked
        with pytest.raises(BrokerUnavailableError):
            await publishing
