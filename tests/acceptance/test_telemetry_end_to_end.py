"""The log of telemetry on RabbitMQ: messages with keys, a route, a leader that is killed, and a reader."""

import asyncio
from collections import defaultdict

import pytest
from daemon_process import PATIENCE, until
from managed_callers import apply, managed, without_workers

from osrdyne import amqp
from osrdyne.amqp.stream_frames import StreamMessage
from osrdyne.amqp.streams import StreamConnection
from osrdyne.client import AsyncClient
from osrdyne.protocol.messages import DUPLICATE_HEADER
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.telemetry import KEY_HEADER, partition_of
from tests.connections import connected

KEYS = [f"plant/{number}" for number in range(10)]
MESSAGES = 1_500
PARTITIONS = 2
ROUTE = 'FROM /messages/* INTO BrokeredEndpoint("/streams/plant/inputs/log")'


async def read_log(streams: StreamConnection, names: PoolNames) -> list[tuple[int, StreamMessage]]:
    """Every message with its partition, in the order of the partition."""
    found = []
    for partition in range(PARTITIONS):
        bounds = await streams.bounds(names.log_stream(partition))
        if bounds is not None:
            async for several in streams.read(names.log_stream(partition), bounds):
                found += [(partition, one) for one in several]
    return found


@pytest.mark.proves("telemetry/leader-dies-log-confirmed")
async def test_log_has_every_message_although_its_leader_was_killed(make_daemon, broker_settings, pool_id, tmp_path):
    daemon = managed(make_daemon, telemetry={"name": "plant", "partitions": PARTITIONS})
    await without_workers(daemon)
    apply(daemon, tmp_path, {"log": ROUTE})
    names, uri = PoolNames(pool_id), broker_settings.uri.get_secret_value()
    options = amqp.ConnectionOptions(uri=uri, connect_timeout=PATIENCE, rpc_timeout=PATIENCE)

    async def publish(number):
        message = amqp.Message(b'{"value": %d}' % number, message_id=f"m{number}")
        key = KEYS[number % len(KEYS)]
        await channel.publish(message, exchange=names.requests_exchange, routing_key=key, mandatory=True)

    async with (
        connected(uri, rpc_timeout=PATIENCE) as connection,
        await StreamConnection.open(options, silence=PATIENCE) as streams,
    ):
        channel = await connection.channel(confirms=True)
        publishing = asyncio.gather(*map(publish, range(MESSAGES)))

        async def has_some():
            return len(await read_log(streams, names)) >= 100

        await until(has_some, "the leader writes to the log")
        daemon.kill()
        await publishing
        await daemon.start()

        async def has_all():
            return len({one.message_id for _, one in await read_log(streams, names)}) == MESSAGES

        await until(has_all, "the next leader writes what is left")
        log = await read_log(streams, names)

    first: defaultdict[str, list[int]] = defaultdict(list)
    seen: set[str | None] = set()
    for partition, one in log:
        key = str(one.headers[KEY_HEADER])
        assert partition == partition_of(Key(key), PARTITIONS)
        if one.message_id in seen:
            assert one.headers[DUPLICATE_HEADER] is True
        else:
            seen.add(one.message_id)
            first[key].append(int(str(one.message_id)[1:]))
    assert {key: sorted(numbers) for key, numbers in first.items()} == {
        key: [number for number in range(MESSAGES) if number % len(KEYS) == place] for place, key in enumerate(KEYS)
    }

    async with AsyncClient(uri, pool_id) as client:
        reply = await client.call(KEYS[0], "/telemetry", {"value": 1})
    assert (reply.code, reply.json()["accepted"]["partition"]) == (202, partition_of(Key(KEYS[0]), PARTITIONS))
