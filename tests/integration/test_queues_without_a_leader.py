"""Request queues that are new when their node is killed: what RabbitMQ has confirmed in them survives, or they come
back without a leader, as with RabbitMQ 3.10 (decision 0020, `broker.trials`)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pydantic import SecretStr

from osrdyne import amqp
from osrdyne.aio.clock import SystemClock
from osrdyne.broker.management.apply import declare_topology
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.publishing.publisher import LeaderPublisher
from osrdyne.broker.queues import request_queues
from osrdyne.broker.queues.request_queues import RequestQueueCommands
from osrdyne.broker.session import LeaderSession
from osrdyne.broker.topology.declarations import pool_topology, request_queue_arguments
from osrdyne.config.models import BrokerSettings, PoolSettings, Settings
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.errors import BrokerError, BrokerSilentError
from osrdyne.protocol.names import Key, PoolNames
from tests.conftest import run_apart

pytestmark = pytest.mark.usefixtures("processes")

NAMES = PoolNames("p")
BOUND, UNBOUND, GOOD = Key("bound"), Key("unbound"), Key("good")
SILENCE = 8.0
"""Seconds after which a queue that does not answer a consumer passes for one without a leader."""


@asynccontextmanager
async def connected(broker: EmbeddedBroker, *, rpc_timeout: float = 60.0) -> AsyncIterator[amqp.Connection]:
    connection = await amqp.connect(amqp.ConnectionOptions(uri=broker.amqp_uri, rpc_timeout=rpc_timeout))
    yield connection
    await connection.close()


@asynccontextmanager
async def leading(broker: EmbeddedBroker, *, rpc_timeout: float = 60.0) -> AsyncIterator[RequestQueueCommands]:
    settings = Settings(
        pool=PoolSettings(id=NAMES.pool),
        broker=BrokerSettings(
            uri=SecretStr(broker.amqp_uri),
            management_uri=SecretStr(broker.management_uri),
            leader_heartbeat=30.0,
            rpc_timeout=rpc_timeout,
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


async def forget_new_queues(broker: EmbeddedBroker) -> None:
    """Kill the node before it has written down two new queues, whatever it has written, and start it again.

    It notes where the log of each quorum queue is in one file; that is put back as it was before.
    """
    await broker.start()
    [table] = (broker.directory / "data").rglob("quorum/*/names.dets")
    async with connected(broker) as connection:
        channel = await connection.channel()
        await declare_topology(channel, pool_topology(NAMES.pool))
        old = [NAMES.request_queue(GOOD), *(queue.name for queue in pool_topology(NAMES.pool).queues)]
        await channel.declare_queue(old[0], arguments=request_queue_arguments(NAMES, GOOD))
        while not all(name.encode() in table.read_bytes() for name in old):
            await asyncio.sleep(0.1)
        before = table.read_bytes()
        for key in (BOUND, UNBOUND):
            await channel.declare_queue(NAMES.request_queue(key), arguments=request_queue_arguments(NAMES, key))
        for key in (BOUND, GOOD):
            await channel.bind_queue(NAMES.request_queue(key), NAMES.requests_exchange, key)
    await broker.kill()
    table.write_bytes(before)
    await broker.start()


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """A node whose queues of `BOUND` and `UNBOUND` have no leader."""
    broker = EmbeddedBroker(Path(tmp_path_factory.mktemp("node")) / "node")
    try:
        run_apart(lambda: forget_new_queues(broker))
        yield broker
    finally:
        run_apart(broker.kill)


async def has_leader(broker: EmbeddedBroker, key: Key, *, within: float) -> bool:
    async with connected(broker, rpc_timeout=within) as connection:
        try:
            await (await connection.channel()).consume(NAMES.request_queue(key))
        except BrokerSilentError:
            return False
        return True


@pytest.mark.nightly
@pytest.mark.proves("broker/queue-leader-too-many")
async def test_queue_without_a_leader_holds_up_no_other(node):
    """What is sent to it holds up its channel for 65 s."""
    async with connected(node) as connection:
        publisher = LeaderPublisher(await connection.channel(confirms=True), connection, clock=SystemClock())
        publishing = {
            asyncio.create_task(publisher.publish(amqp.Message(), exchange=NAMES.requests_exchange, routing_key=key))
            for key in (BOUND, GOOD, BOUND)
        }
        done, waiting = await asyncio.wait(publishing, return_when=asyncio.FIRST_COMPLETED)
        assert ([task.exception() for task in done], len(waiting)) == ([None], 2)
        await publisher.publish(amqp.Message(), exchange=NAMES.requests_exchange, routing_key=GOOD)
        for task in waiting:
            assert not task.done()
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.nightly
@pytest.mark.proves("broker/rabbitmq-4-0-killed")
async def test_queue_that_was_not_persisted_is_declared_again_before_it_is_bound(node, monkeypatch):
    """It would take requests and never confirm them."""
    monkeypatch.setattr(request_queues, "LEADERLESS_SILENCES", 1)
    assert not await has_leader(node, UNBOUND, within=3.0)
    for _ in range(10):
        if await leader_binds(node, UNBOUND):
            break
    assert await has_leader(node, UNBOUND, within=60.0)


async def leader_binds(broker: EmbeddedBroker, key: Key) -> bool:
    """False when the next leader must go on: RabbitMQ may end the connection that has consumed a queue without a leader
    (541), when the queue goes."""
    try:
        async with leading(broker, rpc_timeout=SILENCE) as queues:
            queues.suspect(key)
            await queues.declare(key)
            await queues.bind(key)
    except BrokerError:
        return False
    return True


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
