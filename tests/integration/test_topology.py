"""The topology and the policy of a pool on a real RabbitMQ: what is declared, and how it works."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from osrdyne import amqp
from osrdyne.amqp import Channel, Connection, Delivery, Message
from osrdyne.broker.management.apply import apply_policies, declare_topology
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.topology.declarations import pool_topology, request_queue_arguments
from osrdyne.broker.topology.policies import pool_policy
from osrdyne.config.models import PoolSettings, RequestSettings, Settings
from osrdyne.errors import BrokerConflictError, PublishRefusedError
from osrdyne.protocol.names import KEY_ARGUMENT, Key, PoolNames, QueueName

PATIENCE = 120.0
"""Seconds for anything that must happen; a test that needs them has failed."""
KEY = Key("infra=42,timetable=24")


async def set_up(
    pool: str, channel: Channel, management: ManagementClient, requests: Mapping[str, float] | None = None
) -> QueueName:
    """Topology, policy and one bound request queue."""
    settings = Settings(pool=PoolSettings(id=pool), requests=RequestSettings(**(requests or {})))
    await declare_topology(channel, pool_topology(pool))
    await apply_policies(management, pool_policy(settings, (await management.overview()).version))
    names = PoolNames(pool)
    queue = names.request_queue(KEY)
    await channel.declare_queue(queue, arguments=request_queue_arguments(KEY))
    await channel.bind_queue(queue, names.requests_exchange, KEY)
    return queue


async def next_from(channel: Channel, queue: str) -> Delivery:
    """The next message of a queue."""
    consumer = await channel.consume(queue, prefetch=1)
    async with asyncio.timeout(PATIENCE):
        return await consumer.get()


def first_death(delivery: Delivery) -> object:
    return delivery.headers["x-first-death-reason"]


async def test_declared_twice_changes_nothing(pool_id: str, channel: Channel, management: ManagementClient) -> None:
    await declare_topology(channel, pool_topology(pool_id))
    before = await management.list_queues(f"{pool_id}-")
    await declare_topology(channel, pool_topology(pool_id))
    after = await management.list_queues(f"{pool_id}-")
    assert [(queue.name, queue.arguments) for queue in before] == [(queue.name, queue.arguments) for queue in after]
    assert {queue.name for queue in after} == {queue.name for queue in pool_topology(pool_id).queues}


@pytest.mark.proves("reference-defects/4-broker-restart-lost")
async def test_every_queue_is_a_running_quorum_queue(
    pool_id: str, channel: Channel, management: ManagementClient
) -> None:
    await declare_topology(channel, pool_topology(pool_id))
    queues = await management.list_queues(f"{pool_id}-")
    assert {(queue.type, queue.state) for queue in queues} == {("quorum", "running")}


async def test_a_request_for_an_unknown_key_becomes_an_orphan(
    pool_id: str, channel: Channel, management: ManagementClient
) -> None:
    await set_up(pool_id, channel, management)
    names = PoolNames(pool_id)
    message = Message(b"hello", reply_to="somewhere", correlation_id="c1")
    await channel.publish(message, exchange=names.requests_exchange, routing_key="é/#", mandatory=True)
    orphan = await next_from(channel, names.orphan_queue)
    assert (orphan.exchange, orphan.routing_key, orphan.body) == (names.requests_exchange, "é/#", b"hello")
    assert (orphan.properties.reply_to, orphan.properties.correlation_id) == ("somewhere", "c1")


async def test_a_request_for_a_bound_key_reaches_its_queue(
    pool_id: str, channel: Channel, management: ManagementClient
) -> None:
    queue = await set_up(pool_id, channel, management)
    await channel.publish(Message(b"hello"), exchange=PoolNames(pool_id).requests_exchange, routing_key=KEY)
    assert (await next_from(channel, queue)).body == b"hello"


@pytest.mark.proves("reference-defects/1-nothing-ever-dead")
async def test_an_expired_request_is_dead_lettered(
    pool_id: str, channel: Channel, management: ManagementClient
) -> None:
    await set_up(pool_id, channel, management, {"ttl": 0.05})
    names = PoolNames(pool_id)
    await channel.publish(Message(b"late"), exchange=names.requests_exchange, routing_key=KEY)
    dead = await next_from(channel, names.dead_letter_queue)
    assert (first_death(dead), dead.routing_key, dead.body) == ("expired", KEY, b"late")


async def test_a_rejected_request_is_dead_lettered(
    pool_id: str, channel: Channel, management: ManagementClient
) -> None:
    queue = await set_up(pool_id, channel, management)
    names = PoolNames(pool_id)
    await channel.publish(Message(b"no"), exchange=names.requests_exchange, routing_key=KEY)
    await (await next_from(channel, queue)).reject(requeue=False)
    assert first_death(await next_from(channel, names.dead_letter_queue)) == "rejected"


async def test_a_request_that_fails_too_often_is_dead_lettered(
    pool_id: str, channel: Channel, management: ManagementClient
) -> None:
    queue = await set_up(pool_id, channel, management, {"delivery_limit": 3})
    names = PoolNames(pool_id)
    await channel.publish(Message(b"poison"), exchange=names.requests_exchange, routing_key=KEY)
    consumer = await channel.consume(queue, prefetch=1)
    for _ in range(4):  # a limit of N is N + 1 deliveries
        await (await consumer.get()).reject()
    assert first_death(await next_from(channel, names.dead_letter_queue)) == "delivery_limit"
    assert consumer.waiting() == 0


async def test_an_orphan_whose_time_runs_out_is_dead_lettered(
    pool_id: str, channel: Channel, management: ManagementClient
) -> None:
    await set_up(pool_id, channel, management)
    names = PoolNames(pool_id)
    await channel.publish(Message(b"late", expiration="50"), exchange=names.requests_exchange, routing_key="absent")
    dead = await next_from(channel, names.dead_letter_queue)
    assert (first_death(dead), dead.routing_key) == ("expired", "absent")


async def test_an_orphan_that_the_controller_refuses_shows_where_it_died(
    pool_id: str, channel: Channel, management: ManagementClient
) -> None:
    await set_up(pool_id, channel, management)
    names = PoolNames(pool_id)
    await channel.publish(Message(b"no"), exchange=names.requests_exchange, routing_key="absent")
    await (await next_from(channel, names.orphan_queue)).reject(requeue=False)
    dead = await next_from(channel, names.dead_letter_queue)
    assert (first_death(dead), dead.headers["x-first-death-queue"]) == ("rejected", names.orphan_queue)


async def test_a_full_request_queue_refuses_further_requests(
    pool_id: str, channel: Channel, management: ManagementClient
) -> None:
    await set_up(pool_id, channel, management, {"max_length": 2})
    accepted = 0
    with pytest.raises(PublishRefusedError):
        for _ in range(20):
            await channel.publish(Message(), exchange=PoolNames(pool_id).requests_exchange, routing_key=KEY)
            accepted += 1
    assert accepted >= 2


async def test_the_activity_queue_drops_the_oldest_and_refuses_nothing(pool_id: str, channel: Channel) -> None:
    await declare_topology(channel, pool_topology(pool_id))
    names = PoolNames(pool_id)
    for start in range(0, 10_050, 670):  # each confirm has a time limit
        async with asyncio.TaskGroup() as group:
            for number in range(start, start + 670):
                message = Message(str(number).encode())
                group.create_task(channel.publish(message, exchange=names.activity_exchange, routing_key=KEY))
    assert (await channel.declare_queue(names.activity_queue, passive=True)).ready <= 10_000


@pytest.mark.proves("reference-defects/1-nothing-ever-dead")
async def test_the_policy_applies_to_the_request_queues_of_its_pool_only(
    pool_id: str, channel: Channel, management: ManagementClient
) -> None:
    queue = await set_up(pool_id, channel, management)
    policies = {queue.name: queue.policy for queue in await management.list_queues(f"{pool_id}-")}
    assert policies.pop(queue) == PoolNames(pool_id).policy
    assert set(policies.values()) == {None}


async def test_an_unchanged_policy_is_not_written_again(pool_id: str, management: ManagementClient) -> None:
    version = (await management.overview()).version
    policy = pool_policy(Settings(pool=PoolSettings(id=pool_id)), version)
    assert await apply_policies(management, policy) == [policy]
    assert await apply_policies(management, policy) == []


async def test_a_changed_policy_is_written(pool_id: str, management: ManagementClient) -> None:
    version = (await management.overview()).version
    policies = [
        pool_policy(Settings(pool=PoolSettings(id=pool_id), requests=RequestSettings(ttl=ttl)), version)
        for ttl in (10, 20)
    ]
    await apply_policies(management, policies[0])
    assert await apply_policies(management, policies[1]) == [policies[1]]
    assert await management.get_policy(policies[1].name) == policies[1]


async def test_a_policy_with_every_setting_is_accepted(pool_id: str, management: ManagementClient) -> None:
    requests = RequestSettings(max_length=5, max_length_bytes=2**20)
    settings = Settings(pool=PoolSettings(id=pool_id), requests=requests)
    policy = pool_policy(settings, (await management.overview()).version)
    await management.put_policy(policy)
    assert await management.get_policy(policy.name) == policy


async def test_a_queue_with_other_arguments_is_a_conflict_that_names_it(pool_id: str, channel: Channel) -> None:
    names = PoolNames(pool_id)
    [ours] = [queue for queue in pool_topology(pool_id).queues if queue.name == names.dead_letter_queue]
    await channel.declare_queue(ours.name, arguments={**ours.arguments, "x-delivery-limit": 7})
    with pytest.raises(BrokerConflictError) as conflict:
        await declare_topology(channel, pool_topology(pool_id))
    message = str(conflict.value)
    assert message.startswith(f"The queue {names.dead_letter_queue} exists with other arguments")
    assert "x-delivery-limit" in message and "pool.id" in message and "\n" not in message


async def test_an_exchange_without_its_alternate_is_a_conflict_that_names_it(pool_id: str, channel: Channel) -> None:
    names = PoolNames(pool_id)
    await channel.declare_exchange(names.requests_exchange, "direct")
    with pytest.raises(
        BrokerConflictError, match=f"The exchange {names.requests_exchange} exists .*alternate-exchange"
    ):
        await declare_topology(channel, pool_topology(pool_id))


@pytest.mark.parametrize(
    "key",
    ["A", "%41", "infra=42,timetable=24", "/%#*.:é漢🚄", " a b\n\t\r", "'\"\\", "x" * 255, "é" * 127, "\0"],
    ids=["letter", "percent", "specification", "symbols", "blanks", "quotes", "longest", "shortened", "nul"],
)
async def test_an_odd_key_gets_a_queue_with_the_policy_and_is_recovered(
    key: str, pool_id: str, connection: Connection, channel: Channel, management: ManagementClient
) -> None:
    await set_up(pool_id, channel, management)
    names = PoolNames(pool_id)
    queue = names.request_queue(Key(key))
    await channel.declare_queue(queue, arguments=request_queue_arguments(Key(key)))
    await channel.bind_queue(queue, names.requests_exchange, key)
    await channel.publish(Message(key.encode()), exchange=names.requests_exchange, routing_key=key, mandatory=True)
    assert (await next_from(channel, queue)).body == key.encode()
    [listed] = [listed for listed in await management.list_queues(names.request_queue_prefix) if listed.name == queue]
    assert (listed.policy, listed.arguments[KEY_ARGUMENT]) == (names.policy, key)
    assert key in {binding.routing_key for binding in await management.list_bindings(names.requests_exchange)}


async def test_a_client_may_look_the_requests_exchange_up(pool_id: str, connection: Connection) -> None:
    await declare_topology(await connection.channel(), pool_topology(pool_id))
    client: amqp.Channel = await connection.channel()
    await client.declare_exchange(PoolNames(pool_id).requests_exchange, "direct", passive=True)
    assert not client.is_closed
