"""A worker's own user on a real RabbitMQ: it does what a worker needs, everything else is refused, and it goes away."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from broker_api import http_client

from osrdyne import amqp
from osrdyne.aio.clock import SystemClock
from osrdyne.amqp import Channel, Message
from osrdyne.broker.management.apply import declare_topology
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.management.credentials import LIMITS, ScopedCredentials, user_prefix, worker_permissions
from osrdyne.broker.queues.retry_queues import retry_exchanges, retry_queues
from osrdyne.broker.topology.declarations import pool_topology, request_queue_arguments
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.errors import BrokerAccessError, BrokerNotFoundError
from osrdyne.protocol.names import Key, PoolNames, QueueName, WorkerId
from osrdyne.testing.fakes.amqp import delete_exchange, purge_queue
from osrdyne.testing.keys import ODD_KEYS

MINE, OTHER = Key("tpch/sf=0.01"), Key("tpch/sf=0x01")  # the dot of the first must not match anything
ME, NOT_ME = WorkerId("w.me"), WorkerId("wxme")


@dataclass
class Grants:
    """Users for workers of one pool."""

    names: PoolNames
    credentials: ScopedCredentials


@pytest.fixture
async def grants(broker_settings, pool_id, management):
    names = PoolNames(pool_id)
    credentials = ScopedCredentials(
        names=names,
        layout=QueueLayout(names),
        management=management,
        uri=broker_settings.effective_worker_uri(),
        alive=set,
        start_timeout=300.0,
        interval=60.0,
        clock=SystemClock(),
    )
    yield Grants(names, credentials)
    for user in await users_of(management, pool_id):
        await management.delete_user(user)


async def users_of(management: ManagementClient, pool: str) -> list[str]:
    return await management.list_users(user_prefix(pool, management.vhost))


@pytest.fixture
async def uri(grants, channel):
    """The URI of the worker `ME` of the key `MINE`, in a pool that has other groups as well."""
    names = grants.names
    await declare_topology(channel, pool_topology(names.pool))
    for key in (MINE, OTHER):
        await channel.declare_queue(names.request_queue(key), arguments=request_queue_arguments(names, key))
        await channel.bind_queue(names.request_queue(key), names.requests_exchange, key)
    return await grants.credentials.uri_for(MINE, ME)


@asynccontextmanager
async def worker_channel(uri: str) -> AsyncIterator[Channel]:
    connection = await amqp.connect(amqp.ConnectionOptions(uri=uri, name="osrdyne test worker"))
    try:
        yield await connection.channel(confirms=True)
    finally:
        await connection.close()


async def publish(channel: Channel, exchange: str, routing_key: str) -> None:
    await channel.publish(Message(b"x"), exchange=exchange, routing_key=routing_key)


async def test_process_of_pooled_workers_reads_its_questions_and_reports(grants, uri, channel):
    """And cannot consume requests, or answer any: its workers have users of their own."""
    names, control = grants.names, grants.names.control_queue(NOT_ME)
    async with worker_channel(await grants.credentials.uri_for_process(NOT_ME)) as process:
        await process.declare_queue(control, exclusive=True)
        await process.bind_queue(control, names.control_exchange, names.control_worker_routing_key(NOT_ME))
        consumer = await process.consume(control)
        await publish(process, names.activity_exchange, "pooled")
        await publish(channel, names.control_exchange, names.control_worker_routing_key(NOT_ME))
        assert (await asyncio.wait_for(consumer.get(), 60)).body == b"x"
    refused: list[Attempt] = [
        lambda process, names: process.consume(names.request_queue(MINE)),
        lambda process, names: publish(process, "", "a-reply-queue"),
        lambda process, names: publish(process, names.requests_exchange, MINE),
        lambda process, names: process.declare_queue(names.control_queue(ME), exclusive=True),
    ]
    uri = await grants.credentials.uri_for_process(NOT_ME)
    for number, attempt in enumerate(refused):
        await is_refused(uri, names, attempt, str(number))


Attempt = Callable[[Channel, PoolNames], Awaitable[Any]]
# In these tables n is the names of the pool, c a channel of the worker, and q a queue.
FOREIGN_QUEUES: dict[str, Callable[[PoolNames], str]] = {
    "another group": lambda n: n.request_queue(OTHER),
    "orphans": lambda n: n.orphan_queue,
    "dead letters": lambda n: n.dead_letter_queue,
    "poison": lambda n: n.poison_queue,
    "leader": lambda n: n.leader_queue,
    "activity": lambda n: n.activity_queue,
    "cancels": lambda n: n.cancel_queue,
    "control of another worker": lambda n: n.control_queue(NOT_ME),
    "a name around its own": lambda n: f"x{n.request_queue(MINE)}x",
}
ON_QUEUES: dict[str, Callable[[Channel, str], Awaitable[Any]]] = {
    "consume": lambda c, q: c.consume(q),
    "get": lambda c, q: c.get(q),
    "purge": lambda c, q: purge_queue(c, q),
    "delete": lambda c, q: c.delete_queue(q),
}
ELSEWHERE: dict[str, Attempt] = {
    "delete its request queue": lambda c, n: c.delete_queue(n.request_queue(MINE)),
    "declare a request queue": lambda c, n: c.declare_queue(f"{n.pool}-req-new"),
    "declare any queue": lambda c, n: c.declare_queue("anything"),
    "declare the queue of another worker": lambda c, n: c.declare_queue(n.control_queue(NOT_ME), exclusive=True),
    "declare an exchange": lambda c, n: c.declare_exchange(f"{n.pool}-new", "fanout"),
    "declare a queue with a name below its own": lambda c, n: c.declare_queue(f"{n.control_queue(ME)}.more"),
    "declare an exchange below its own": lambda c, n: c.declare_exchange(f"{n.control_queue(ME)}.more", "fanout"),
    "declare a queue with a name that begins like its own": lambda c, n: c.declare_queue(f"{n.control_queue(ME)}-more"),
    "declare a queue that RabbitMQ names": lambda c, n: c.declare_queue(""),
    "delete an exchange": lambda c, n: delete_exchange(c, n.requests_exchange),
    "unbind its request queue": lambda c, n: c.unbind_queue(n.request_queue(MINE), n.requests_exchange, MINE),
    "bind its request queue": lambda c, n: c.bind_queue(n.request_queue(MINE), n.requests_exchange, "more"),
    "publish requests": lambda c, n: publish(c, n.requests_exchange, OTHER),
    "publish orphans": lambda c, n: publish(c, n.orphan_exchange, OTHER),
    "publish dead letters": lambda c, n: publish(c, n.dead_letter_exchange, OTHER),
    "publish control messages": lambda c, n: publish(c, n.control_exchange, n.control_group_routing_key(MINE)),
    "publish cancels": lambda c, n: publish(c, n.cancel_exchange, OTHER),
    "publish inquiries": lambda c, n: publish(c, n.progress_exchange, OTHER),
    "publish to topics": lambda c, n: publish(c, "amq.topic", "x"),
}


async def is_refused(uri: str, names: PoolNames, attempt: Attempt, what: str) -> None:
    """The first thing that a connection of its own attempts."""
    async with worker_channel(uri) as worker:
        try:
            await attempt(worker, names)
        except BrokerAccessError:
            return
    raise AssertionError(f"{what} is allowed")


async def test_foreign_queue_is_out_of_reach(uri, grants, connection):
    for place, queue in FOREIGN_QUEUES.items():
        name = queue(grants.names)
        try:
            await (await connection.channel()).declare_queue(name, passive=True)
        except BrokerNotFoundError:
            await (await connection.channel()).declare_queue(name)
        for verb, on_queue in ON_QUEUES.items():
            await is_refused(uri, grants.names, lambda worker, _: on_queue(worker, name), f"{verb} {place}")  # noqa: B023


async def test_everything_else_is_refused(uri, grants):
    for what, attempt in ELSEWHERE.items():
        await is_refused(uri, grants.names, attempt, what)


async def test_worker_of_a_managed_pool_may_send_requests_to_wait_and_no_further(uri, grants, channel, management):
    """Asked of RabbitMQ with the permissions of a managed pool, on the user of a direct one."""
    names = grants.names
    exchanges = QueueLayout(names, managed=True).exchanges
    for topology in (exchanges, retry_exchanges(names, ()), retry_queues(names, [500])):
        await declare_topology(channel, topology)
    [user] = await users_of(management, names.pool)
    await management.put_permissions(user, worker_permissions(names, [], ME, has_retries=True))
    async with worker_channel(uri) as worker:
        await publish(worker, names.retry_exchange, MINE)
    for exchange in (names.retried_exchange, names.work_exchange()):
        async with worker_channel(uri) as worker:
            with pytest.raises(BrokerAccessError, match="access to exchange"):
                await publish(worker, exchange, MINE)
    async with worker_channel(uri) as worker:
        with pytest.raises(BrokerAccessError, match="access to queue"):
            await worker.consume(names.retry_queue(500))


@asynccontextmanager
async def control_queue(uri: str, names: PoolNames) -> AsyncIterator[tuple[Channel, QueueName]]:
    async with worker_channel(uri) as worker:
        queue = names.control_queue(ME)
        await worker.declare_queue(queue, exclusive=True, auto_delete=True)
        yield worker, queue


async def test_control_messages_and_exchanges_of_others_cannot_be_listened_to(uri, grants):
    names = grants.names
    for routing_key in ("#", "group.*", "group.tpch+2Fsf+3D0x01", "worker.wxme", ""):
        async with control_queue(uri, names) as (worker, queue):
            with pytest.raises(BrokerAccessError, match="topic"):
                await worker.bind_queue(queue, names.control_exchange, routing_key)
    for exchange in ("req", "orphan", "dl", "activity", "cancel"):
        async with control_queue(uri, names) as (worker, queue):
            with pytest.raises(BrokerAccessError, match="access to exchange"):
                await worker.bind_queue(queue, f"{names.pool}-{exchange}-xchg", MINE)


async def test_credit_of_its_streams_reaches_it(uri, grants, channel):
    async with control_queue(uri, grants.names) as (worker, queue):
        await worker.bind_queue(queue, grants.names.credit_exchange, ME)
        consumer = await worker.consume(queue)
        await publish(channel, grants.names.credit_exchange, ME)
        assert (await asyncio.wait_for(consumer.get(), 60)).exchange == grants.names.credit_exchange
    async with worker_channel(uri) as worker:
        with pytest.raises(BrokerAccessError, match="access to exchange"):
            await publish(worker, grants.names.credit_exchange, OTHER)


async def test_http_api_lets_it_do_nothing(uri, broker_settings):
    me, api = urlsplit(uri), urlsplit(broker_settings.effective_management_uri())
    user = (unquote(me.username or ""), unquote(me.password or ""))
    async with http_client(f"{api.scheme}://{api.hostname}:{api.port}", auth=user) as http:
        assert [(await http.get(f"/api/{path}")).status_code for path in ("whoami", "queues", "users")] == [401] * 3


async def test_default_exchange_reaches_every_queue(uri, grants, channel):
    """What scoped credentials do not prevent; docs/reference/security/worker-credentials.md documents it."""
    async with worker_channel(uri) as worker:
        await publish(worker, "", grants.names.request_queue(OTHER))
    delivery = await channel.get(grants.names.request_queue(OTHER))
    assert delivery is not None


async def test_workers_of_odd_keys_can_take_their_requests(grants, channel):
    names = grants.names
    await declare_topology(channel, pool_topology(names.pool))
    for number, key in enumerate(ODD_KEYS.values()):
        worker_id = WorkerId(f"w{number}")
        queue, control = names.request_queue(key), names.control_queue(worker_id)
        await channel.declare_queue(queue, arguments=request_queue_arguments(names, key))
        async with worker_channel(await grants.credentials.uri_for(key, worker_id)) as worker:
            await worker.consume(queue)
            await worker.declare_queue(control, exclusive=True, auto_delete=True)
            await worker.bind_queue(control, names.control_exchange, names.control_group_routing_key(key))


async def test_connections_are_limited(uri):
    options = amqp.ConnectionOptions(uri=uri, name="osrdyne test worker")
    opened: list[amqp.Connection] = []
    with pytest.raises(BrokerAccessError):
        while len(opened) < LIMITS["max-connections"] + 20:  # RabbitMQ counts a connection shortly after it is open
            opened += [await amqp.connect(options)]
    assert len(opened) >= LIMITS["max-connections"]
    for connection in opened:
        await connection.close()


async def test_user_of_an_ended_worker_goes_with_its_connections_and_what_it_made(uri, grants, management):
    name = grants.names.control_queue(ME)
    async with worker_channel(uri) as worker:
        await worker.declare_queue(name, arguments={"x-queue-type": "quorum"})  # stays when the connection is gone
        await worker.declare_exchange(name, "fanout")
        assert name in await management.list_exchanges()
        grants.credentials.release(ME)
        await grants.credentials.tidy()
        assert isinstance(await worker.wait_closed(), Exception)
    with pytest.raises(BrokerAccessError):
        await amqp.connect(amqp.ConnectionOptions(uri=uri))
    exchanges = await management.list_exchanges()
    assert (name in exchanges, grants.names.control_exchange in exchanges) == (False, True)
    assert await management.list_queues(name) == []
