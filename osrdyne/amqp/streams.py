"""Reads RabbitMQ streams over AMQP 0.9.1: ranges of offsets, the ends of a stream, and new messages.

A stream is a queue that keeps its messages; reading takes nothing out of it. No plugin and no other port is needed.
Used by `osrdyne_sources`, `osrdyne.telemetry` and the ingest of workers. Independent of Spark.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from osrdyne.amqp.channel import Channel
from osrdyne.amqp.connection import Connection, ConnectionOptions, connect
from osrdyne.amqp.consumer import Consumer
from osrdyne.amqp.pamqp_patches import Int64
from osrdyne.amqp.stream_frames import OFFSET_HEADER, FrameError, StreamFrames, StreamMessage
from osrdyne.amqp.transport import CoalescingTransport, FrameReader
from osrdyne.errors import BrokerConflictError, BrokerSilentError, StreamDataLostError

_LAST_CHUNK = 5_000
"""Prefetch with which the last chunk is read; RabbitMQ writes at most 4,096 messages into one."""
_LAST_CHUNK_ROUNDS = 100
"""Reads of the last chunk after which the last message read counts as the end of a stream that grows meanwhile."""
_CONSUME_AGAIN = 5.0
"""Seconds without a message after which a stream that has messages is consumed again."""
_FOLLOW_AGAIN = 15.0
"""The same for a reader at the end of the stream, where silence is normal."""
_EMPTY_WAIT = 2.0
"""Seconds without a message after which a stream with a count of zero is empty: RabbitMQ sends messages at once."""


@dataclass(frozen=True, slots=True)
class StreamRange:
    """The offsets from `start` to before `stop`."""

    start: int
    stop: int


class _FramesReader(FrameReader):
    """Decodes stream messages from the received bytes, and passes the rest on to aiormq."""

    def __init__(self, loop: asyncio.AbstractEventLoop, frames: StreamFrames) -> None:
        super().__init__(loop)
        self.arrival: asyncio.Future[None] = loop.create_future()  # done when the next messages arrive
        self._loop_of_futures = loop
        self.frames = frames

    def feed_data(self, data: Any) -> None:
        try:
            rest = self.frames.feed(bytes(data))
        except FrameError as error:
            self.set_exception(ConnectionError(str(error)))
            return
        if self.frames.messages:
            arrival, self.arrival = self.arrival, self._loop_of_futures.create_future()
            arrival.set_result(None)
        if rest:
            super().feed_data(rest)


class _FramesTransport(CoalescingTransport):
    def __init__(self) -> None:
        super().__init__()
        self.frames = StreamFrames()

    def new_reader(self) -> FrameReader:
        self._reader = self.frames_reader = reader = _FramesReader(asyncio.get_running_loop(), self.frames)
        reader.login = bytearray()
        return reader


class StreamConnection:
    """A connection that only reads streams; `async with await StreamConnection.open(options)` closes it.

    `silence` is the time in seconds without a message after which a read fails.
    """

    def __init__(self, connection: Connection, transport: _FramesTransport, *, silence: float) -> None:
        self._connection = connection
        self._reader = transport.frames_reader
        self._silence = silence

    @classmethod
    async def open(cls, options: ConnectionOptions, *, silence: float = 60.0) -> Self:
        """Connect. Raises the errors of `amqp.connect`."""
        transport = _FramesTransport()
        return cls(await connect(options, transport=transport), transport, silence=silence)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def is_closed(self) -> bool:
        return self._connection.is_closed

    async def close(self) -> None:
        await self._connection.close()

    async def bounds(self, stream: str) -> StreamRange | None:
        """Return the offset of the first message and the offset after the last; None for a stream without messages.

        Raises `BrokerNotFoundError`, and `BrokerConflictError` when the queue is not a stream.
        """
        stop = await self.next_offset(stream)
        return None if stop is None else StreamRange(await self.first_offset(stream), stop)

    async def first_offset(self, stream: str) -> int:
        """Return the offset of the first message of a stream that is not empty."""
        async with aclosing(self._attached(stream, "first", prefetch=1, silence=self._silence)) as several:
            return (await anext(several))[0].offset

    async def next_offset(self, stream: str) -> int | None:
        """Return the offset after the last message; None for a stream without messages, because retention may remove
        all.

        AMQP 0.9.1 has no command for it, so the last chunk is read to its end.
        """
        channel = await self._connection.channel()
        try:
            counted = (await channel.declare_queue(stream, passive=True)).ready
        finally:
            await channel.close()
        # The count is up to 5 s old: a count of zero does not prove that the stream is empty.
        silence = self._silence if counted else min(_EMPTY_WAIT, self._silence)
        last = -1
        try:
            async for messages in self._attached(stream, "last", prefetch=_LAST_CHUNK, silence=silence, to_end=True):
                last = messages[-1].offset
        except BrokerSilentError:
            if counted:
                raise
        return None if last < 0 else last + 1

    async def first_after(self, stream: str, bounds: StreamRange, is_after: Callable[[StreamMessage], bool]) -> int:
        """Return the first offset of a range from which on `is_after` is true; the end of the range if it is never.

        A binary search: `is_after` must be false up to some message and true from there on.
        """
        low, high = bounds.start, bounds.stop
        while low < high:
            middle = (low + high) // 2
            # A stream may have no message at some offsets: RabbitMQ sends the next one.
            async with aclosing(self._attached(stream, Int64(middle), prefetch=1, silence=self._silence)) as several:
                message = (await anext(several))[0]
            if is_after(message):
                high = middle
            else:
                low = max(message.offset, middle) + 1
        return low

    async def read(
        self, stream: str, wanted: StreamRange, *, prefetch: int = 1_000, fail_on_data_loss: bool = True
    ) -> AsyncIterator[list[StreamMessage]]:
        """Read the messages of a range in order, as they arrive. The stream must have a message at its end or after it.

        A stream may have no message at some offsets. Raises `StreamDataLostError` if messages of the range are no
        longer in the stream, unless `fail_on_data_loss` is false; `BrokerSilentError` if no message arrives for
        `silence` seconds; `BrokerUnavailableError` if the connection is lost: the caller may go on reading over another
        one.
        """
        expected, deadline = wanted.start, asyncio.get_running_loop().time() + self._silence
        while expected < wanted.stop:
            attached = self._attached(stream, Int64(expected), prefetch=prefetch, silence=_CONSUME_AGAIN)
            attached_at = expected
            try:
                async with aclosing(attached) as several:
                    async for messages in several:
                        # Only before the first message: a consumer never skips removed segments later.
                        if fail_on_data_loss and expected == attached_at and messages[0].offset > expected:
                            await self._check_lost(stream, StreamRange(expected, wanted.stop))
                        fresh = [one for one in messages if expected <= one.offset < wanted.stop]
                        expected = max(expected, messages[-1].offset + 1)
                        if fresh:
                            yield fresh
                        if expected >= wanted.stop:
                            return
                        deadline = asyncio.get_running_loop().time() + self._silence
            except BrokerSilentError:
                if await self.next_offset(stream) is None:
                    if fail_on_data_loss:
                        raise _lost(stream, StreamRange(expected, wanted.stop), "it has no message") from None
                    return
                if asyncio.get_running_loop().time() >= deadline:
                    raise

    async def follow(
        self,
        stream: str,
        start: int | None,
        *,
        prefetch: int = 1_000,
        on_lost: Callable[[StreamRange], None] | None = None,
    ) -> AsyncGenerator[list[StreamMessage], None]:
        """Read from an offset on (None: from the first message), and then new messages as they are published.

        Calls `on_lost` with offsets that are no longer in the stream, before the messages after them. While the caller
        handles messages, at most `prefetch` others arrive. Raises the same as `read`; `BrokerUnavailableError` also if
        the stream is deleted.
        """
        expected = start
        while True:
            position: str | int = "first" if expected is None else Int64(expected)
            attached = self._attached(stream, position, prefetch=prefetch, silence=math.inf, again=_FOLLOW_AGAIN)
            begins = True
            async with aclosing(attached) as several:
                async for messages in several:
                    # Only before the first message: a consumer never skips removed segments later.
                    if begins and expected is not None and messages[0].offset > expected and on_lost is not None:
                        lost = StreamRange(expected, min(await self.first_offset(stream), messages[0].offset))
                        if lost.stop > lost.start:
                            on_lost(lost)
                    begins = False
                    fresh = messages if expected is None else [one for one in messages if one.offset >= expected]
                    if fresh:
                        expected = fresh[-1].offset + 1
                        yield fresh

    async def _check_lost(self, stream: str, wanted: StreamRange) -> None:
        """Raise `StreamDataLostError` if the stream begins after the start of the range."""
        first = await self.first_offset(stream)
        if first > wanted.start:
            raise _lost(stream, StreamRange(wanted.start, min(first, wanted.stop)), f"it begins with {first}")

    async def _attached(
        self,
        stream: str,
        position: str | int,
        *,
        prefetch: int,
        silence: float,
        to_end: bool = False,
        again: float = _CONSUME_AGAIN,
    ) -> AsyncGenerator[list[StreamMessage], None]:
        """Consume from a position on; with `to_end` only the messages that exist now.

        Consumes again if nothing arrives for `again` seconds: a consumer whose next segment was removed by the
        retention gets no further message. Ends instead if messages have arrived, because the position has moved.
        """
        deadline = asyncio.get_running_loop().time() + silence
        while True:
            async with _Reading(self._connection, self._reader, stream, position, prefetch=prefetch) as reading:
                received = False
                for _ in itertools.count() if not to_end else range(_LAST_CHUNK_ROUNDS):
                    remaining = silence if received else deadline - asyncio.get_running_loop().time()
                    try:
                        messages = await reading.next(min(remaining, again))
                    except BrokerSilentError:
                        if received:
                            return
                        break
                    received = True
                    # Before the caller handles them, so that RabbitMQ sends the next ones meanwhile.
                    await reading.channel.ack(messages[-1].delivery_tag, multiple=True)
                    yield messages
                    if to_end:
                        # RabbitMQ sends existing messages, up to the prefetch, before it answers the next command.
                        await reading.channel.ping()
                        if not reading.has_messages():
                            return
                else:
                    return
            if asyncio.get_running_loop().time() >= deadline:
                raise BrokerSilentError(
                    f"No message of the stream {stream} arrived within {silence:g} s, from {position} on."
                )


def _lost(stream: str, lost: StreamRange, why: str) -> StreamDataLostError:
    return StreamDataLostError(
        f"The offsets {lost.start} to {lost.stop - 1} of the stream {stream} are no longer in it: {why}. Its retention "
        "removed them before they were read.",
        stream=stream,
        start=lost.start,
        stop=lost.stop,
    )


class _Reading:
    """One consumer of a stream on a channel of its own."""

    channel: Channel

    def __init__(
        self, connection: Connection, reader: _FramesReader, stream: str, position: str | int, *, prefetch: int
    ) -> None:
        self._connection = connection
        self._reader = reader
        self._stream = stream
        self._position = position
        self._prefetch = prefetch
        self._ended: asyncio.Future[Any] | None = None

    async def __aenter__(self) -> Self:
        self.channel = await self._connection.channel()
        try:
            arguments = {OFFSET_HEADER: self._position}
            consumer = await self.channel.consume(self._stream, prefetch=self._prefetch, arguments=arguments)
        except BaseException:
            await self.channel.close()
            raise
        self._ended = asyncio.ensure_future(_end_of(consumer))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ended is not None:
            self._ended.cancel()
        await self.channel.close()
        self._reader.frames.forget(self.channel.number)

    def take(self) -> list[StreamMessage]:
        """Return the messages that have arrived. Raises `BrokerConflictError` if the queue is not a stream."""
        messages = self._reader.frames.take(self.channel.number)
        if messages and messages[0].offset < 0:
            raise BrokerConflictError(f"The queue {self._stream} is not a stream: declare it with x-queue-type=stream.")
        return messages

    def has_messages(self) -> bool:
        return bool(self._reader.frames.messages.get(self.channel.number))

    async def next(self, silence: float) -> list[StreamMessage]:
        """Return the next messages. Raises `BrokerSilentError` if none arrives for `silence` seconds."""
        assert self._ended is not None, "the consumer must be open"
        deadline = asyncio.get_running_loop().time() + silence
        while not (messages := self.take()):
            if self._ended.done():
                self._ended.result()
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0:
                raise BrokerSilentError(f"No message of the stream {self._stream} arrived within {silence:g} s.")
            arrival = self._reader.arrival
            await asyncio.wait({arrival, self._ended}, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
        return messages


async def _end_of(consumer: Consumer) -> object:
    """Wait for the end of a consumer, which raises the reason. It has no deliveries: `_FramesReader` takes them."""
    return await consumer.get()
