"""A request queue that is new, and what RabbitMQ has confirmed in it, survive a kill of the node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

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
KEYS = [Key(f"k{number}") for number in range(5)]


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
        yield session.request_queues(management)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@asynccontextmanager
async def a_channel(broker: EmbeddedBroker) -> AsyncIterator[amqp.Channel]:
    connection = await amqp.connect(amqp.ConnectionOptions(uri=broker.amqp_uri))
    yield await connection.channel(confirms=True)
    await connection.close()


async def activate(queues: RequestQueueCommands, client: amqp.Channel, key: Key) -> None:
    await queues.declare(key)
    await queues.bind(key)
    message = amqp.Message(body=key.encode())
    await client.publish(message, exchange=NAMES.requests_exchange, routing_key=key, mandatory=True)


async def take(channel: amqp.Channel, key: Key) -> str | None:
    delivery = await channel.get(NAMES.request_queue(key))
    return None if delivery is None else delivery.body.decode()


async def activate_at_once(queues: RequestQueueCommands, client: amqp.Channel) -> None:
    await asyncio.gather(*(activate(queues, client, key) for key in KEYS))


async def activate_one_by_one(queues: RequestQueueCommands, client: amqp.Channel) -> None:
    for key in KEYS:
        await activate(queues, client, key)


ONE_BY_ONE = pytest.param(activate_one_by_one, marks=pytest.mark.nightly)


@pytest.mark.parametrize("activate_all", [activate_at_once, ONE_BY_ONE])
@pytest.mark.proves("broker/rabbitmq-killed-right-queue")
async def test_requests_in_queues_that_are_new_survive_a_kill_of_the_node(tmp_path: Path, activate_all: Any) -> None:
    """Queues of keys that are new at the same time are persisted together; a single one by a queue of its own."""
    async with EmbeddedBroker(tmp_path / "node") as broker:
        async with leading(broker) as queues, a_channel(broker) as client:
            await activate_all(queues, client)
            await broker.kill()
        await broker.start()
        async with a_channel(broker) as channel:
            assert [await take(channel, key) for key in KEYS] == KEYS
