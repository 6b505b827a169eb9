"""What the log of telemetry relies on in RabbitMQ, of any version that is supported: its arguments and retention."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from filled_streams import AT_ONCE, batched, padded

from osrdyne import amqp
from osrdyne.amqp import Channel
from osrdyne.amqp.streams import StreamConnection, StreamRange
from osrdyne.broker.management.apply import declare_topology
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.topology.telemetry import LogPlan, plan_log, streams_of
from osrdyne.config.models import TelemetrySettings
from osrdyne.protocol.names import PoolNames, QueueName

PATIENCE = 120.0
SMALL = TelemetrySettings(name="plant", partitions=1, max_bytes="1MiB")


async def plan_of(management: ManagementClient, names: PoolNames, settings: TelemetrySettings) -> LogPlan:
    listed = await management.list_queues(names.log_stream_prefix)
    return plan_log(names, settings, streams_of(names, listed))


async def declare(channel: Channel, pool: str, settings: TelemetrySettings) -> QueueName:
    """Declare a log; its first stream."""
    names = PoolNames(pool)
    await declare_topology(channel, plan_log(names, settings, {}).topology)
    return names.log_stream(0)


async def fill(channel: Channel, stream: str, count: int) -> None:
    for several in batched(padded(count), AT_ONCE):
        await asyncio.gather(*(channel.publish(one, exchange="", routing_key=stream) for one in several))


@asynccontextmanager
async def opened(uri: str) -> AsyncIterator[StreamConnection]:
    options = amqp.ConnectionOptions(uri=uri, connect_timeout=PATIENCE, rpc_timeout=PATIENCE)
    async with await StreamConnection.open(options, silence=PATIENCE) as streams:
        yield streams


async def test_declared_log_is_listed_as_declared(pool_id, channel, management):
    """The number of partitions too, which RabbitMQ does not know."""
    names, settings = PoolNames(pool_id), TelemetrySettings(name="plant", partitions=3, max_age="90s")
    await declare(channel, pool_id, settings)
    assert await plan_of(management, names, settings) == plan_log(names, settings, {})
    found = await plan_of(management, names, TelemetrySettings(name="plant", partitions=4, max_age="90s"))
    assert found.partitions == 3
    assert len(found.conflicts) == 4, "the partitions, and the share of each of three streams"


@pytest.mark.parametrize(
    "retention", [{}, {"max_age": 1.0, "max_bytes": 2**30}], ids=["beyond its size", "beyond its age"]
)
async def test_retention_removes_the_oldest_messages(broker, pool_id, channel, retention):
    settings = SMALL.model_copy(update=retention)
    arguments = plan_log(PoolNames(pool_id), settings, {}).streams[0].arguments
    stream = PoolNames(pool_id).log_stream(0)
    # Segments of the least size, so that a test fills several.
    small_segments = {**arguments, "x-stream-max-segment-size-bytes": 2**16}
    await channel.declare_queue(stream, arguments=small_segments)
    async with asyncio.timeout(PATIENCE), opened(broker.amqp_uri) as streams:
        await fill(channel, stream, 1_000)
        # RabbitMQ removes segments when it begins a new one.
        while not await streams.first_offset(stream):
            await fill(channel, stream, 300)


async def test_position_of_a_reader_survives_that_a_stream_is_declared_again(broker, pool_id, channel):
    stream = await declare(channel, pool_id, SMALL)
    await fill(channel, stream, 20)
    await declare(channel, pool_id, SMALL)
    async with opened(broker.amqp_uri) as streams:
        assert await streams.first_offset(stream) == 0
        assert await streams.bounds(stream) == StreamRange(0, 20)
