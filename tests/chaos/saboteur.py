"""Loses requests on purpose: `--sabotage` shows that the fault suite would notice."""

import asyncio
from contextlib import suppress

from osrdyne.errors import BrokerError, BrokerNotFoundError
from osrdyne.protocol.names import PoolNames
from osrdyne.testing.fakes.amqp import purge_queue
from tests.chaos.callers import KEYS
from tests.chaos.nodes import Node
from tests.chaos.pool import POOL
from tests.connections import connected

INTERVAL = 0.5


async def lose_requests(broker: Node) -> None:
    """Purge the request queues again and again: what waits in them is gone, without any notice."""
    while True:
        with suppress(BrokerError):
            async with connected(broker.amqp_uri, name="osrdyne saboteur") as connection:
                for key in KEYS:
                    with suppress(BrokerNotFoundError):
                        channel = await connection.channel()
                        await purge_queue(channel, PoolNames(POOL).request_queue(key))
                        await channel.close()
        await asyncio.sleep(INTERVAL)
