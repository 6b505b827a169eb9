"""Request queues that are new when their node is killed: what RabbitMQ has confirmed in them survives (decision 0020).

Queues that come back without a leader: `tests/component/broker`, and `tests/chaos`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from pydantic import SecretStr

from osrdyne import amqp
from osrdyne.aio.clock import SystemClock
from osrdyne.broker.management.apply import declare_topology
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.queues.request_queues import RequestQueueCommands
from osrdyne.broker.session import LeaderSession
from osrdyne.broker.topology.declarations import pool_topology
from osrdyne.config.models import BrokerSettings, PoolSettings, Settings
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.protocol.names import Key, PoolNames

pytestmark = pytest.mark.usefixtures("processes")

NAMES = PoolNames("p")


@asynccontextmanager
async def connected(broker: EmbeddedBroker) -> AsyncIterator[amqp.Connection]:
    connection = await amqp.connect(amqp.ConnectionOptions(uri=broker.amqp_uri, rpc_timeout=60.0))
    yield connection
    await connection.close()


@asynccontextmanager
async def leading(broker: EmbeddedBroker) -> AsyncIterator[RequestQueueCommands]:
    settings = Settings(
        pool=PoolSettings(id=NAMES.pool),
        broker=BrokerSettings(
            uri=SecretStr(broker.amqp_uri),
            management_uri=SecretStr(broker.management_uri),
            leader_heartbeat=30.0,
            rpc_timeout=60.0,
        ),
    )
    async with ManagementClient(settings.broker) as management, LeaderSession(settings, clock=SystemClock()) as session:
        _, token = await session.token.acquire()
        await declare_topology(await session.channel(), pool_topology(NAMES.pool))
        keeping = asyncio.create_task(session.run(token))
        try:
            yield session.request_queues(management)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


KEYS = [Key(f"k{number}") for number in range(5)]


async def activate(queues: RequestQueueCommands, client: amqp.Channel, key: Key) -> None:
    await queues.declare(key)
    await queues.bind(key)
    message = amqp.Message(body=key.encode())
    await client.publish(message, exchange=NAMES.requests_exchange, routing_key=key, mandatory=True)


@pytest.mark.parametrize("at_once", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.proves("broker/rabbitmq-killed-right-queue")
async def test_requests_in_queues_that_are_new_survive_a_kill_of_the_node(tmp_path, at_once):
    """Queues of keys that are new at the same time are persisted together; a single one by a queue of its own."""
    async with EmbeddedBroker(tmp_path / "node") as broker:
        async with leading(broker) as queues, connected(broker) as connection:
            client = await connection.channel(confirms=True)
            for keys in [KEYS] if at_once else [[key] for key in KEYS]:
                await asyncio.gather(*(activate(queues, client, key) for key in keys))
            await broker.kill()
        await broker.start()
        async with connected(broker) as connection:
            channel = await connection.channel()
            found = [await channel.get(NAMES.request_queue(key)) for key in KEYS]
            assert [delivery and delivery.body.decode() for delivery in found] == KEYS
