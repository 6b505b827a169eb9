"""A splitter put in force over HTTP, with a whole daemon and a real broker; the test plays the workers."""

from __future__ import annotations

import pytest
from broker_api import until
from daemon_in_process import api_of, group_of, managed_settings, running_daemon

from osrdyne import amqp
from osrdyne.amqp import Channel, Delivery
from osrdyne.daemon.daemon import Daemon
from osrdyne.protocol.messages import SPLIT_HEADER
from osrdyne.protocol.names import Key, PoolNames

pytestmark = pytest.mark.usefixtures("processes")

RULES = {"camera": {"postfixFromStatic": ["A", "B", "C"]}, "orders": {"postfixFromRequest": {"header": "customer"}}}


@pytest.fixture
async def daemon(broker_settings, pool_id, tmp_path):
    async with running_daemon(managed_settings(broker_settings, pool_id, tmp_path)) as daemon, api_of(daemon) as api:
        answer = await api.put("/v1/splitter", json=RULES, params={"author": "test"})
        assert answer.json() == {"pool": pool_id, "version": 1, "warnings": []}
        yield daemon


async def publish(connection: amqp.Connection, names: PoolNames, key: str, *bodies: bytes, **headers: object) -> None:
    channel = await connection.channel(confirms=True)
    for body in bodies:
        message = amqp.Message(body=body, headers=headers)
        await channel.publish(message, exchange=names.requests_exchange, routing_key=key, mandatory=True)
    await channel.close()


async def first_of(channel: Channel, daemon: Daemon, queue: str, key: str) -> Delivery:
    """The first request of a group, which its worker holds from then on."""

    async def exists() -> bool:
        return bool((await group_of(daemon, key)).get("queue", {}).get("exists"))

    await until(exists)
    return await (await channel.consume(queue, prefetch=1)).get()


async def test_requests_of_one_key_are_served_beside_each_other(daemon, connection, channel, pool_id):
    names = PoolNames(pool_id)
    await publish(connection, names, "camera", b"1", b"2", b"3", b"4")
    keys = [Key(f"camera-{name}") for name in "ABC"]
    held = [await first_of(channel, daemon, names.request_queue(key), key) for key in keys]
    assert [(one.body, one.headers[SPLIT_HEADER]) for one in held] == [(body, "camera") for body in (b"1", b"2", b"3")]
    async with api_of(daemon) as api:
        explained = await api.post("/v1/explain", json={"key": "orders", "headers": {"customer": "7"}})
    assert [delivery["key"] for delivery in explained.json()["deliveries"]] == ["orders-7"]
