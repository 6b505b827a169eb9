"""What readers of streams, and the log of telemetry, rely on in RabbitMQ, of any version that is supported."""

import asyncio
from datetime import UTC, datetime

import pytest
from filled_streams import AT_ONCE, SMALL_SEGMENTS, batched, fill, numbered, padded

from osrdyne import amqp
from osrdyne.amqp.stream_frames import StreamMessage
from osrdyne.amqp.streams import StreamConnection, StreamRange
from osrdyne.broker.management.apply import declare_topology
from osrdyne.broker.topology.telemetry import LogPlan, plan_log, streams_of
from osrdyne.config.models import TelemetrySettings
from osrdyne.errors import BrokerConflictError, BrokerNotFoundError, StreamDataLostError
from osrdyne.protocol.names import PoolNames


@pytest.fixture
async def streams(broker):
    options = amqp.ConnectionOptions(uri=broker.amqp_uri, connect_timeout=120, rpc_timeout=120)
    async with await StreamConnection.open(options, silence=120) as opened:
        yield opened


@pytest.fixture
def stream(pool_id):
    return f"{pool_id}-log"


async def read(streams: StreamConnection, stream: str, start: int, stop: int, **options: object) -> list[StreamMessage]:
    found = streams.read(stream, StreamRange(start, stop), **options)
    return [one async for messages in found for one in messages]


async def test_the_end_is_after_the_last_confirmed_message(broker, streams, stream):
    """Right after the confirm, for streams that count no messages yet, and again as they grow."""
    await fill(broker.amqp_uri, stream, [])
    assert await streams.bounds(stream) is None
    await fill(broker.amqp_uri, stream, numbered(1))
    assert await streams.bounds(stream) == StreamRange(0, 1)
    for stop in (2, 3, 700, 701, 6_000):
        before = (await streams.bounds(stream)).stop
        await fill(broker.amqp_uri, stream, numbered(stop - before))
        assert await streams.bounds(stream) == StreamRange(0, stop)


async def test_ranges_are_exact_whatever_width_their_offsets_have(broker, streams, stream):
    """127, 128 and 255 are where narrower integers change their sign."""
    await fill(broker.amqp_uri, stream, numbered(600))
    for start, stop in ((0, 1), (0, 600), (126, 130), (127, 128), (128, 129), (255, 257), (599, 600), (5, 5)):
        found = await read(streams, stream, start, stop, prefetch=50)
        assert [one.offset for one in found] == list(range(start, stop))
    everything = await read(streams, stream, 0, 600, prefetch=7)
    assert sorted(int(one.body) for one in everything) == list(range(600))


async def test_messages_arrive_as_they_were_published(broker, streams, stream):
    sent = amqp.Message(
        b"\x00\xff" * 300_000,  # several frames
        headers={"device": "süd-1", "count": 70_000, "ratio": 0.5},
        content_type="application/json",
        content_encoding="gzip",
        correlation_id="c",
        message_id="m",
        timestamp=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        reply_to="nowhere",
        expiration="100000",
        priority=3,
        app_id="app",
    )
    await fill(broker.amqp_uri, stream, [sent])
    await fill(broker.amqp_uri, stream, [amqp.Message()])
    full, empty = await read(streams, stream, 0, 2)
    assert (full.body, full.headers) == (sent.body, sent.headers)
    assert (full.content_type, full.content_encoding) == (sent.content_type, sent.content_encoding)
    assert (full.correlation_id, full.message_id, full.timestamp) == ("c", "m", sent.timestamp)
    assert (full.exchange, full.routing_key) == ("", stream)
    assert (empty.body, empty.headers, empty.content_type, empty.timestamp) == (b"", {}, None, None)


async def test_several_ranges_are_read_over_one_connection(broker, streams, stream):
    names = [f"{stream}-{number}" for number in range(3)]
    for name in names:
        await fill(broker.amqp_uri, name, numbered(400))
    found = await asyncio.gather(*(read(streams, name, 100, 300, prefetch=20) for name in names))
    assert [[one.offset for one in messages] for messages in found] == [list(range(100, 300))] * 3


async def test_a_truncated_range_is_reported(broker, streams, stream):
    await fill(broker.amqp_uri, stream, padded(200), arguments=SMALL_SEGMENTS)
    bounds = await streams.bounds(stream)
    assert bounds.start > 0
    with pytest.raises(StreamDataLostError, match=f"The offsets 0 to {bounds.start - 1} of the stream") as lost:
        await read(streams, stream, 0, bounds.stop)
    assert (lost.value.fields["start"], lost.value.fields["stop"]) == (0, bounds.start)
    rest = await read(streams, stream, 0, bounds.stop, fail_on_data_loss=False)
    assert (rest[0].offset, rest[-1].offset) == (bounds.start, bounds.stop - 1)
    assert await read(streams, stream, 0, bounds.start, fail_on_data_loss=False) == []


async def test_a_range_of_a_stream_without_messages_is_reported(broker, streams, stream, monkeypatch):
    """Retention may have removed every message after the range was planned."""
    monkeypatch.setattr("osrdyne.amqp.streams._CONSUME_AGAIN", 0.1)
    await fill(broker.amqp_uri, stream, [])
    with pytest.raises(StreamDataLostError, match=r"The offsets 3 to 6 .* it has no message"):
        await read(streams, stream, 3, 7)
    assert await read(streams, stream, 3, 7, fail_on_data_loss=False) == []


async def test_offsets_without_a_message_are_not_lost_messages(broker, streams, stream):
    """RabbitMQ uses up an offset for its own notes at the beginning of each segment."""
    small = {"x-stream-max-segment-size-bytes": 20_000}
    await fill(broker.amqp_uri, stream, padded(200), arguments=small)
    bounds = await streams.bounds(stream)
    offsets = [one.offset for one in await read(streams, stream, 0, bounds.stop)]
    assert len(offsets) == 200
    unused = sorted(set(range(bounds.stop)) - set(offsets))
    assert unused
    for offset in unused:
        # Not past the end of the stream: a read waits for the messages of its range.
        stop = min(offset + 3, bounds.stop)
        after = await read(streams, stream, offset, stop)
        assert [one.offset for one in after] == [one for one in offsets if offset <= one < stop]


async def test_a_queue_that_is_not_a_stream_is_refused_and_a_missing_stream_named(channel, streams, stream):
    with pytest.raises(BrokerNotFoundError, match=stream):
        await streams.bounds(stream)
    await channel.declare_queue(stream)
    await channel.publish(amqp.Message(b"work"), exchange="", routing_key=stream)
    with pytest.raises(BrokerConflictError):
        await streams.bounds(stream)
    assert (await (await channel.consume(stream)).get()).body == b"work"


async def test_first_message_after_a_condition_is_found(broker, streams, stream):
    await fill(broker.amqp_uri, stream, numbered(300))
    bounds = StreamRange(20, 280)
    for wanted in (0, 20, 21, 150, 279, 280, 400):
        found = await streams.first_after(stream, bounds, lambda one, wanted=wanted: int(one.body) >= wanted)
        assert found == min(max(wanted, 20), 280)


SMALL = TelemetrySettings(name="plant", partitions=1, max_bytes="1MiB")


def log_of(pool: str, settings: TelemetrySettings) -> LogPlan:
    return plan_log(PoolNames(pool), settings, {})


async def publish(channel: amqp.Channel, stream: str, count: int) -> None:
    for several in batched(padded(count), AT_ONCE):
        await asyncio.gather(*(channel.publish(one, exchange="", routing_key=stream) for one in several))


async def test_declared_log_is_listed_as_declared(pool_id, channel, management):
    """The number of partitions too, which RabbitMQ does not know."""
    names, settings = PoolNames(pool_id), TelemetrySettings(name="plant", partitions=3, max_age="90s")
    await declare_topology(channel, log_of(pool_id, settings).topology)
    listed = streams_of(names, await management.list_queues(names.log_stream_prefix))
    assert plan_log(names, settings, listed) == log_of(pool_id, settings)
    found = plan_log(names, TelemetrySettings(name="plant", partitions=4, max_age="90s"), listed)
    assert found.partitions == 3
    assert len(found.conflicts) == 4, "the partitions, and the share of each of three streams"


@pytest.mark.parametrize("retention", [{}, {"max_age": 1.0, "max_bytes": 2**30}], ids=["size", "age"])
async def test_retention_removes_the_oldest_messages(pool_id, channel, streams, retention):
    arguments = log_of(pool_id, SMALL.model_copy(update=retention)).streams[0].arguments
    stream = PoolNames(pool_id).log_stream(0)
    # Segments of the least size, so that a test fills several.
    await channel.declare_queue(stream, arguments={**arguments, "x-stream-max-segment-size-bytes": 2**16})
    await publish(channel, stream, 1_000)
    # RabbitMQ removes segments when it begins a new one.
    while not await streams.first_offset(stream):
        await publish(channel, stream, 300)


async def test_stream_that_is_declared_again_keeps_its_messages(pool_id, channel, streams):
    stream = PoolNames(pool_id).log_stream(0)
    for count in (20, 0):
        await declare_topology(channel, log_of(pool_id, SMALL).topology)
        await publish(channel, stream, count)
    assert await streams.first_offset(stream) == 0
    assert await streams.bounds(stream) == StreamRange(0, 20)
