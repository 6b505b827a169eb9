"""Hostile messages as frames to a real RabbitMQ: what it lets through harms neither a leader nor a worker."""

import pytest
from broker_api import ready_in, until
from raw_amqp import raw_publisher
from test_term import daemon_of, publish, settings_of, take
from worker_process import stage

from osrdyne.amqp import Message
from osrdyne.amqp.version import BrokerVersion
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.testing.hostile import HostileMessage, hostile_message

pytestmark = pytest.mark.usefixtures("processes")

COUNT = 200
LARGEST = 128 * 2**20
"""What RabbitMQ takes before version 4, bytes."""
KEYS = (b"a", b"b", "漢".encode())
FORGED = [
    f"amq.rabbitmq.reply-to.{rest}"
    for rest in ("", "x", "$$$.x", "g1h2AA==.bm93aGVyZQ==", "g1h2AA5yZXBseUAxMjM0NTY3OAAAAyUAAAAAawBTuA==.eHh4eA==")
]
"""The last one is like that of a node that has left the cluster."""


def places(names: PoolNames) -> list[tuple[str, bytes | None]]:
    """Every way into a queue of the controller: exchange, and the routing key if it is not the message's own."""
    exchanges = ("requests", "orphan", "dead_letter", "activity", "cancel")
    own = [(getattr(names, f"{name}_exchange"), None) for name in exchanges]
    return [*own, ("", names.leader_queue.encode()), ("", names.poison_queue.encode())]


@pytest.mark.proves("hostile/hostile-messages-any-queue", "hostile/forged-direct-reply-address")
async def test_frames_that_no_library_sends_and_forged_addresses_do_not_harm_a_leader(
    broker, broker_settings, pool_id, channel
):
    """RabbitMQ 3.10 ends the connection that answers to a forged direct reply address, again and again."""
    names = PoolNames(pool_id)
    ways = places(names)
    async with daemon_of(settings_of(broker_settings, pool_id)) as running, raw_publisher(broker.amqp_uri) as raw:
        taken = 0
        for number in range(COUNT):
            exchange, routing_key = ways[number % len(ways)]
            message = hostile_message(number, keys=KEYS, user=raw.user)
            taken += await raw.publish(message, exchange=exchange, routing_key=routing_key)
        assert taken > COUNT / 2
        for address in FORGED:
            await publish(channel, names, "\udcff", reply_to=address)
        await publish(channel, names, "good", b"good")
        assert await take(channel, names.request_queue(Key("good")), 1) == [b"good"]
        for queue in (names.orphan_queue, names.dead_letter_queue, names.activity_queue, names.cancel_queue):
            await until(lambda: ready_in(channel, queue), equals=0)  # noqa: B023
        assert await running.leads() == 1


@pytest.mark.proves("hostile/hostile-messages-any-queue", "hostile/forged-direct-reply-address")
async def test_frames_that_no_library_sends_and_forged_addresses_do_not_harm_a_worker(broker, pool_id):
    async with stage(broker.amqp_uri, pool_id, forked=True) as pool, raw_publisher(broker.amqp_uri) as raw:
        worker = await pool.start(runtime={"concurrency": 4, "skip_abandoned": True})
        for address in FORGED:
            message = Message(b"x", headers={"x-rpc-path": "/echo"}, reply_to=address)
            await pool.channel.publish(message, exchange=pool.names.requests_exchange, routing_key=pool.key)
        assert (await pool.caller.call("/echo", b"alive")).body == b"alive"
        assert not [line for line in worker.lines if "RabbitMQ delivers it again" in line]
        control = pool.names.control_group_routing_key(pool.key).encode()
        taken = 0
        for number in range(COUNT):
            hostile = hostile_message(number, user=raw.user)
            taken += await raw.publish(hostile, exchange="", routing_key=pool.names.request_queue(pool.key).encode())
            await raw.publish(hostile, exchange=pool.names.control_exchange, routing_key=control)
        assert taken > COUNT / 2
        assert (await pool.caller.call("/echo", b"alive")).body == b"alive"
        assert worker.process.returncode is None


@pytest.mark.proves("requests/body-128-mib-largest")
async def test_largest_message_that_rabbitmq_takes_is_forwarded(broker, broker_settings, pool_id, channel, connection):
    names = PoolNames(pool_id)
    huge = HostileMessage(0, b"a", b"\0\0", bytes(LARGEST))
    async with daemon_of(settings_of(broker_settings, pool_id)) as running, raw_publisher(broker.amqp_uri) as raw:
        taken = await raw.publish(huge, exchange=names.requests_exchange)
        assert taken or BrokerVersion.parse(connection.server_version).major >= 4
        await publish(channel, names, "a", b"good")
        sizes: list[int] = []
        while 4 not in sizes:  # a leader that loses its lead meanwhile passes the first one on twice
            sizes += [len(body) for body in await take(channel, names.request_queue(Key("a")), 1)]
        assert list(dict.fromkeys(sizes)) == [LARGEST] * taken + [4]
        await running.leads()
