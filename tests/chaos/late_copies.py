"""Doubled and late control messages: half of those that the leader sends reach their process a second time.

The copies come up to `LATEST` seconds late, so that an `assign` may follow the `release` of the same worker, and one
of a deposed leader the first message of the next. Losses need no module: links that are cut or stalled lose messages.
"""

import asyncio
from contextlib import suppress
from functools import partial
from random import Random

from osrdyne import amqp
from osrdyne.errors import BrokerError
from osrdyne.protocol.names import PoolNames
from tests.chaos.nodes import Node
from tests.connections import keep_connected

SHARE = 0.5
LATEST = 8.0
"""Seconds: longer than a question is repeated, a worker is released, and a daemon is restarted."""
COPY_HEADER = "x-late-copy"
"""Marks a copy, which is not copied again."""


class LateCopies:
    """`run` copies until it is cancelled, and then prints how many copies it made."""

    def __init__(self, broker: Node, pool: str, *, seed: int) -> None:
        self._uri = broker.amqp_uri
        self._exchange = PoolNames(pool).control_exchange
        self._random = Random(f"{seed} copies")
        self._made = 0

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                # The node may be down, or the exchange not there yet: a copy that is not made is no fault.
                await keep_connected(partial(self._copy, group), self._uri, connect_timeout=5.0)
        finally:
            print(f"{self._made} late copies of control messages")

    async def _copy(self, group: asyncio.TaskGroup, connection: amqp.Connection) -> None:
        channel = await connection.channel()
        queue = f"copies-of-{self._exchange}"
        await channel.declare_queue(queue, exclusive=True, auto_delete=True)
        await channel.bind_queue(queue, self._exchange, "#")
        async for delivery in await channel.consume(queue, no_ack=True):
            if COPY_HEADER not in delivery.headers and self._random.random() < SHARE:
                delay = self._random.uniform(0.0, LATEST)
                group.create_task(self._repeat(channel, delivery, delay), name="late copy")

    async def _repeat(self, channel: amqp.Channel, delivery: amqp.Delivery, delay: float) -> None:
        await asyncio.sleep(delay)
        copy = amqp.Message(
            delivery.body, headers={COPY_HEADER: True}, content_type=delivery.properties.content_type, persistent=False
        )
        with suppress(BrokerError):
            await channel.publish(copy, exchange=delivery.exchange, routing_key=delivery.routing_key)
            self._made += 1
