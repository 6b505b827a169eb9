"""A request queue that is new, and what RabbitMQ has confirmed in it, survive a kill of the node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import SecretStr

from osrdyne import amqp
from osrdyne.aio.clock import SystemClock
from osrdyne.broker.declare import declare_topology
from osrdyne.broker.embedded import EmbeddedBroker
from osrdyne.broker.management import ManagementClient
from osrdyne.broker.request_queues import RequestQueueCommands
from osrdyne.broker.session import LeaderSession
from osrdyne.broker.topology import pool_topology
from osrdyne.config.models import BrokerSettings, PoolSettings, Settings
from osrdyne.protocol.names import Key, PoolNames

NAMES = PoolNames("p")
KEY = Key("k")


@asynccontextmanager
async def leading(broker: EmbeddedBroker) -> AsyncIterator[RequestQueueCommands]:
    uris = BrokerSettings(uri=SecretStr(broker.amqp_uri), management_uri=SecretStr(broker.management_uri))
    settings = Settings(pool=PoolSettings(id=NAMES.pool), broker=uris)
    async with ManagementClient(uris) as management, LeaderSession(settings, clock=SystemClock()) as session:
        _, token = await session.token.acquire()
        await declare_topology(await session.channel(), pool_topology(NAMES.pool))
        keeping = asyncio.create_task(session.run(token))
        yield session.request_queues(management)
        keeping.cancel()
        await asyncio.wait({keeping})


async def publish(broker: EmbeddedBroker, body: bytes) -> None:
    connection = await amqp.connect(amqp.ConnectionOptions(uri=broker.amqp_uri))
    channel = await connection.channel(confirms=True)
    await channel.publish(amqp.Message(body=body), exchange=NAMES.requests_exchange, routing_key=KEY, mandatory=True)
    await connection.close()


async def take(broker: EmbeddedBroker) -> bytes | None:
    connection = await amqp.connect(amqp.ConnectionOptions(uri=broker.amqp_uri))
    delivery = await (await connection.channel()).get(NAMES.request_queue(KEY))
    await connection.close()
    return None if delivery is None else delivery.body


async def test_request_in_a_queue_that_is_new_survives_a_kill_of_the_node(tmp_path: Path) -> None:
    async with EmbeddedBroker(tmp_path / "node") as broker:
        async with leading(broker) as queues:
            await queues.declare(KEY)
            await queues.bind(KEY)
            await publish(broker, b"confirmed")
            await broker.kill()
        await broker.start()
        assert await take(broker) == b"confirmed"
