"""The queues that make RabbitMQ persist new ones: decisions 0020 and 0045."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from pydantic import SecretStr

from osrdyne import amqp
from osrdyne.aio.clock import SystemClock
from osrdyne.broker.leadership.channel_pool import ChannelPool
from osrdyne.broker.queues.durability import QueueDurability
from osrdyne.protocol.names import PoolNames

TURNS = 20


@asynccontextmanager
async def of_term(term: int, pool: str, uri: SecretStr) -> AsyncIterator[QueueDurability]:
    """The queues of a leader, over a connection of its own."""
    connection = await amqp.connect(amqp.ConnectionOptions(uri=uri.get_secret_value()))
    channels = ChannelPool(connection)
    filling = asyncio.create_task(channels.run())
    try:
        yield QueueDurability(PoolNames(pool), channels, term=lambda: term, clock=SystemClock())
        assert not connection.is_closed
    finally:
        filling.cancel()
        await connection.close()


async def write(durability: QueueDurability) -> None:
    for _ in range(TURNS):
        await durability.persist()


@pytest.mark.proves("broker/rabbitmq-3-10-still")
async def test_next_leader_is_not_disturbed_by_commands_of_the_one_before(broker_settings, pool_id):
    """With the names of the other term, RabbitMQ 3.10 would end the connection in every second turn (541)."""
    async with of_term(1, pool_id, broker_settings.uri) as earlier, of_term(2, pool_id, broker_settings.uri) as later:
        await asyncio.gather(write(earlier), write(later))
