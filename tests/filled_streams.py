"""Streams with messages, for the tests of their readers."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TypeVar

from osrdyne import amqp
from tests.connections import connected

STREAM = {"x-queue-type": "stream"}
SMALL_SEGMENTS = {"x-stream-max-segment-size-bytes": 20_000, "x-max-length-bytes": 100_000}
"""Retention removes whole segments, when one is full. Some stay: a chunk is smaller than a segment."""
T = TypeVar("T")
AT_ONCE = 10
"""Messages in flight: RabbitMQ writes as many into one chunk at most."""


async def fill(
    uri: str, stream: str, messages: Iterable[amqp.Message], *, arguments: Mapping[str, object] | None = None
) -> None:
    """Declare a stream and publish messages in order; each one is confirmed."""
    async with connected(uri, connect_timeout=120, rpc_timeout=120) as connection:
        channel = await connection.channel(confirms=True)
        await channel.declare_queue(stream, arguments=STREAM | dict(arguments or {}))
        for several in batched(messages, AT_ONCE if arguments else 1_000):
            await asyncio.gather(*(channel.publish(one, exchange="", routing_key=stream) for one in several))


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while several := list(islice(rest, size)):
        yield several


def numbered(count: int, *, first: int = 0) -> list[amqp.Message]:
    """Messages whose bodies are their numbers."""
    return [amqp.Message(b"%d" % number) for number in range(first, first + count)]


def padded(count: int) -> list[amqp.Message]:
    """Messages of 1 KiB each, which fill segments."""
    return [amqp.Message(b"x" * 1024) for _ in range(count)]
