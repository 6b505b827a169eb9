"""Streams with messages, for the tests of their readers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from osrdyne import amqp

STREAM = {"x-queue-type": "stream"}
SMALL_SEGMENTS = {"x-stream-max-segment-size-bytes": 20_000, "x-max-length-bytes": 100_000}
"""Retention removes whole segments, when one is full. Some stay: a chunk is smaller than a segment."""
AT_ONCE = 10
"""Messages in flight: RabbitMQ writes as many into one chunk at most."""


async def fill(
    uri: str, stream: str, messages: Iterable[amqp.Message], *, arguments: Mapping[str, object] | None = None
) -> None:
    """Declare a stream and publish messages in order; each one is confirmed."""
    connection = await amqp.connect(amqp.ConnectionOptions(uri=uri, connect_timeout=120, rpc_timeout=120))
    try:
        channel = await connection.channel(confirms=True)
        await channel.declare_queue(stream, arguments=STREAM | dict(arguments or {}))
        for several in batched(messages, AT_ONCE if arguments else 1_000):
            async with asyncio.TaskGroup() as group:
                for message in several:
                    group.create_task(channel.publish(message, exchange="", routing_key=stream))
    finally:
        await connection.close()


def batched(messages: Iterable[amqp.Message], size: int) -> Iterator[list[amqp.Message]]:
    rest = iter(messages)
    while several := list(islice(rest, size)):
        yield several


def numbered(count: int, *, first: int = 0) -> list[amqp.Message]:
    """Messages whose bodies are their numbers."""
    return [amqp.Message(b"%d" % number) for number in range(first, first + count)]


def padded(count: int) -> list[amqp.Message]:
    """Messages of 1 KiB each, which fill segments."""
    return [amqp.Message(b"x" * 1024) for _ in range(count)]
