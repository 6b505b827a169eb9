"""The topology and the policy of a pool on a real RabbitMQ: what is declared, and how it works.

That keys, odd ones too, have queues of their own is in `tests/contract/test_request_queue_contract.py`.
"""

import asyncio

import pytest
from broker_api import PATIENCE, ready_in

from osrdyne.amqp import Channel, Delivery, Message
from osrdyne.broker.management.apply import apply_policies, declare_topology
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.topology.declarations import pool_topology, request_queue_arguments
from osrdyne.broker.topology.policies import PolicySpec, pool_policy
from osrdyne.config.models import PoolSettings, RequestSettings, Settings
from osrdyne.protocol.names import Key, PoolNames, QueueName

KEY = Key("infra=42,timetable=24")


class Pool:
    """The topology of a pool, and one bound request queue."""

    def __init__(self, pool: str, channel: Channel, management: ManagementClient) -> None:
        self.names = PoolNames(pool)
        self.channel = channel
        self.management = management
        self.queue: QueueName = self.names.request_queue(KEY)

    async def policy(self, **requests: float) -> PolicySpec:
        settings = Settings(pool=PoolSettings(id=self.names.pool), requests=RequestSettings(**requests))
        return pool_policy(settings, (await self.management.overview()).version)

    async def apply(self, **requests: float) -> None:
        await apply_policies(self.management, await self.policy(**requests))

    async def declare(self, key: Key) -> QueueName:
        queue = self.names.request_queue(key)
        await self.channel.declare_queue(queue, arguments=request_queue_arguments(self.names, key))
        await self.channel.bind_queue(queue, self.names.requests_exchange, key)
        return queue

    async def publish(self, body: bytes, key: str = KEY, **properties: str) -> None:
        message = Message(body, **properties)
        await self.channel.publish(message, exchange=self.names.requests_exchange, routing_key=key, mandatory=True)

    async def next_from(self, queue: str) -> Delivery:
        consumer = await self.channel.consume(queue, prefetch=1)
        async with asyncio.timeout(PATIENCE):
            return await consumer.get()

    async def dead_letter(self) -> tuple[object, object, str, bytes]:
        """Why and where the next one died, its key and its body."""
        consumer = await self.channel.consume(self.names.dead_letter_queue, prefetch=1)
        async with asyncio.timeout(PATIENCE):
            dead = await consumer.get()
        await dead.ack()
        await self.channel.cancel(consumer)
        headers = dead.headers
        return headers["x-first-death-reason"], headers["x-first-death-queue"], dead.routing_key, dead.body


@pytest.fixture
async def pool(pool_id, channel, management):
    await declare_topology(channel, pool_topology(pool_id))
    pool = Pool(pool_id, channel, management)
    await pool.apply()
    await pool.declare(KEY)
    return pool


@pytest.mark.proves("reference-defects/4-broker-restart-lost")
async def test_every_queue_is_a_running_quorum_queue(pool):
    """Declared a second time, nothing changes; and the policy is that of the request queues alone."""
    before = await pool.management.list_queues(f"{pool.names.pool}-")
    await declare_topology(pool.channel, pool_topology(pool.names.pool))
    after = await pool.management.list_queues(f"{pool.names.pool}-")
    assert {(queue.type, queue.state) for queue in after} == {("quorum", "running")}
    assert [(queue.name, queue.arguments) for queue in before] == [(queue.name, queue.arguments) for queue in after]
    policies = {queue.name: queue.policy for queue in after}
    assert policies.pop(pool.queue) == pool.names.policy
    assert policies == dict.fromkeys((queue.name for queue in pool_topology(pool.names.pool).queues), None)


@pytest.mark.proves("reference-defects/1-nothing-ever-dead")
async def test_requests_and_orphans_that_expire_or_fail_are_dead_lettered(pool):
    await pool.publish(b"no")
    await (await pool.next_from(pool.queue)).reject(requeue=False)
    assert await pool.dead_letter() == ("rejected", pool.queue, KEY, b"no")
    await pool.publish(b"late", "absent", expiration="50")
    assert await pool.dead_letter() == ("expired", pool.names.orphan_queue, "absent", b"late")
    await pool.publish(b"no", "absent")
    await (await pool.next_from(pool.names.orphan_queue)).reject(requeue=False)
    assert await pool.dead_letter() == ("rejected", pool.names.orphan_queue, "absent", b"no")


@pytest.mark.proves("reference-defects/1-nothing-ever-dead")
async def test_policy_decides_when_a_request_is_dead_lettered(pool):
    await pool.apply(delivery_limit=3)
    await pool.publish(b"poison")
    consumer = await pool.channel.consume(pool.queue, prefetch=1)
    for _ in range(3):
        await (await consumer.get()).reject()
    assert await pool.dead_letter() == ("delivery_limit", pool.queue, KEY, b"poison")
    assert consumer.waiting() == 0
    await pool.channel.cancel(consumer)
    await pool.apply(ttl=0.05)
    await pool.publish(b"late")
    assert await pool.dead_letter() == ("expired", pool.queue, KEY, b"late")


async def test_the_activity_queue_drops_the_oldest_and_refuses_nothing(pool):
    names = pool.names
    for start in range(0, 10_050, 670):  # each confirm has a time limit
        async with asyncio.TaskGroup() as group:
            for number in range(start, start + 670):
                message = Message(str(number).encode())
                group.create_task(pool.channel.publish(message, exchange=names.activity_exchange, routing_key=KEY))
    assert await ready_in(pool.channel, names.activity_queue) <= 10_000


async def test_the_policy_is_written_when_it_has_changed_and_every_setting_is_accepted(pool):
    policy = await pool.policy(ttl=10, max_length=5, max_length_bytes=2**20)
    assert await apply_policies(pool.management, policy) == [policy]
    assert await apply_policies(pool.management, policy) == []
    assert await pool.management.get_policy(policy.name) == policy
