"""A daemon that is killed during a sweep for expired requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from daemon_process import PATIENCE, MakeDaemon, until
from managed_callers import managed, until_passed_on, without_workers

from osrdyne import amqp
from osrdyne.amqp import Channel, Delivery
from osrdyne.config.models import BrokerSettings
from osrdyne.protocol.messages import DUPLICATE_HEADER
from osrdyne.protocol.names import Key, PoolNames

REQUESTS, BATCH = 1_500, 300


@pytest.fixture
async def channel(broker_settings: BrokerSettings) -> AsyncIterator[Channel]:
    connection = await amqp.connect(amqp.ConnectionOptions(uri=broker_settings.uri.get_secret_value(), name="caller"))
    yield await connection.channel(confirms=True)
    await connection.close()


async def publish(channel: Channel, names: PoolNames, replies: str, *, until_passed: Callable[[int], Any]) -> None:
    """Numbered requests; every third one expires when all are surely passed on, but for those of the first batch."""
    loop = asyncio.get_running_loop()
    lifetime = 600.0

    async def one(number: int) -> None:
        seconds = 600.0 if number % 3 else lifetime
        expiration = str(int(seconds * 1000))
        message = amqp.Message(b"%d" % number, correlation_id=str(number), reply_to=replies, expiration=expiration)
        await channel.publish(message, exchange=names.requests_exchange, routing_key="k", mandatory=True)

    began = loop.time()
    for first in range(0, REQUESTS, BATCH):
        await asyncio.gather(*map(one, range(first, first + BATCH)))
        if first == 0:
            await until_passed(BATCH)
            lifetime = 3.0 + 2 * REQUESTS / BATCH * (loop.time() - began)
    await until_passed(REQUESTS)


async def everything(channel: Channel, queue: str) -> list[Delivery]:
    """What the queue holds, in order."""
    found: list[Delivery] = []
    async with asyncio.timeout(PATIENCE):
        while (delivery := await channel.get(queue)) is not None:
            found.append(delivery)
    return found


@pytest.mark.proves("managed/leader-dies-sweeps-queue")
async def test_daemon_killed_while_it_cleans_a_queue_loses_nothing_and_keeps_the_order(
    make_daemon: MakeDaemon, channel: Channel, pool_id: str
) -> None:
    names, replies = PoolNames(pool_id), f"{pool_id}-answers"
    queue = names.request_queue(Key("k"))
    await channel.declare_queue(replies)
    requests = {"check_entire_queue_on_cleanup": True, "cleanup_interval": "4s", "max_clock_skew": "500ms"}
    daemon = managed(make_daemon, requests=requests)
    await without_workers(daemon)
    await publish(channel, names, replies, until_passed=lambda count: until_passed_on(daemon, count, route=""))

    async def ready() -> int:
        return (await channel.declare_queue(queue, passive=True)).ready

    async def is_being_cleaned() -> bool:
        return 0 < await ready() < REQUESTS // 2

    await until(is_being_cleaned, "the queue is being put back", interval=0.0)
    daemon.kill()
    await until(lambda: gone(channel, queue), "the daemon's connections are gone")
    found = await everything(channel, queue)
    firsts = list(dict.fromkeys(int(delivery.body) for delivery in found))
    assert [number for number in firsts if number % 3] == [number for number in range(REQUESTS) if number % 3]
    seen: set[bytes] = set()
    for delivery in found:
        assert delivery.body not in seen or delivery.headers.get(DUPLICATE_HEADER) or delivery.redelivered
        seen.add(delivery.body)
    await without_workers(daemon)  # what was handed to the dead letters is answered by the next leader
    expired = set(range(REQUESTS)) - set(firsts)
    answered: set[int] = set()

    async def all_answered() -> bool:
        answered.update(int(one.properties.correlation_id or "") for one in await everything(channel, replies))
        return answered >= expired

    await until(all_answered, "the expired ones are answered")


async def gone(channel: Channel, queue: str) -> bool:
    """Whether no consumer holds a request of the queue any more."""
    return (await channel.declare_queue(queue, passive=True)).consumers == 0
