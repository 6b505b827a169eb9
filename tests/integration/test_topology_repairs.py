"""A running daemon whose objects in RabbitMQ are deleted or changed by hand: real RabbitMQ, noop driver."""

from __future__ import annotations

import asyncio

from test_term import daemon_of, eventually, publish, settings_of, take

from osrdyne.amqp import Channel
from osrdyne.config.models import BrokerSettings, LifecycleSettings
from osrdyne.protocol.names import Key, PoolNames

A = Key("a")
NEVER = LifecycleSettings(resync_interval=3600.0)


async def test_deleted_request_queue_is_served_again_at_once(
    broker_settings: BrokerSettings, pool_id: str, channel: Channel
) -> None:
    """It was noticed by the next comparison, and requests went round until they were refused."""
    names = PoolNames(pool_id)
    async with daemon_of(settings_of(broker_settings, pool_id, NEVER)) as running:
        await publish(channel, names, A, b"before")
        assert await take(channel, names.request_queue(A), 1) == [b"before"]
        await channel.delete_queue(names.request_queue(A))
        await asyncio.gather(*(publish(channel, names, A, b"%d" % number) for number in range(50)))
        bodies = await take(channel, names.request_queue(A), 50)
        assert sorted(bodies) == sorted(b"%d" % number for number in range(50))
        await channel.unbind_queue(names.request_queue(A), names.requests_exchange, A)
        await publish(channel, names, A, b"after")
        assert await take(channel, names.request_queue(A), 1) == [b"after"]
        await eventually(lambda: running.term.queue_board[A].is_bound)
