"""Send messages of the log again, as requests to another pool: throttled, confirmed, and resumable.

A request has the body, the properties and the message id of the message, its key, and `x-telemetry-replay`, which names
the stream and the offset. It has no reply address. The steps for one batch, and what a crash leaves:

1. Publish, with confirm and mandatory. Crash before: nothing of the batch was sent. After: some or all of it was.
2. Store the progress. Crash before: the batch is sent a second time, with the same message ids. After: not again.

Used by `osrdyne telemetry resend`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from osrdyne.aio.clock import Clock
from osrdyne.amqp import Message
from osrdyne.amqp.stream_frames import StreamMessage
from osrdyne.amqp.streams import StreamConnection, StreamRange
from osrdyne.errors import ConfigurationError
from osrdyne.protocol.deadlines import DEADLINE_HEADER
from osrdyne.protocol.messages import without_identity
from osrdyne.protocol.names import PoolNames
from osrdyne.protocol.telemetry import KEY_HEADER
from osrdyne.telemetry.times import parse_time, taken_from

REPLAY_HEADER = "x-telemetry-replay"
"""The stream and the offset of a message that is sent again, as `plant-log-2/5000`."""
OWN_PREFIX = "x-osrdyne-"
BATCH = 100
"""The maximum number of messages in flight, and so of messages that are sent twice after a crash."""


class RequestsPublisher(Protocol):
    """A channel with publisher confirms."""

    async def publish(self, message: Message, *, exchange: str, routing_key: str, mandatory: bool = False) -> None: ...


@dataclass(frozen=True, slots=True)
class ResendOrder:
    """The range to send again: from `begin` to before `end`. Both are offsets, times, or None for an end of the log."""

    log_pool: str
    to_pool: str
    begin: int | str | None
    end: int | str | None


@dataclass(slots=True)
class Progress:
    """The next offset and the end of each partition. `file`: where they are stored; None: they are not stored."""

    order: ResendOrder
    file: Path | None = None
    ranges: dict[int, StreamRange] = field(default_factory=dict)

    @classmethod
    def load(cls, order: ResendOrder, file: Path | None) -> Progress:
        """Read the file, if there is one. Raises `ConfigurationError` if it is invalid or of another order."""
        if file is None or not file.exists():
            return cls(order, file)
        try:
            document: dict[str, Any] = json.loads(file.read_bytes())
            ranges = {int(one): StreamRange(int(first), int(stop)) for one, (first, stop) in document["ranges"].items()}
            same = document["order"] == _shown(order)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"--state: {file} is not the progress of a replay ({type(error).__name__}); name another file."
            ) from None
        if not same:
            raise ConfigurationError(f"--state: {file} is the progress of another replay; name another file.")
        return cls(order, file, ranges)

    def save(self) -> None:
        """Replace the file atomically, also in case of a power failure. Raises `ConfigurationError`."""
        if self.file is None:
            return
        ranges = {str(one): [wanted.start, wanted.stop] for one, wanted in self.ranges.items()}
        unfinished = self.file.with_name(f"{self.file.name}.tmp")
        try:
            with unfinished.open("w", encoding="utf-8") as file:
                json.dump({"order": _shown(self.order), "ranges": ranges}, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self.file)
            directory = os.open(self.file.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise ConfigurationError(f"--state: {self.file} cannot be written: {error.strerror}.") from None


class Resend:
    """One run. `rate`: messages a second of all partitions together; None: no limit but the confirms."""

    def __init__(
        self,
        progress: Progress,
        *,
        streams: StreamConnection,
        publisher: RequestsPublisher,
        rate: float | None,
        clock: Clock,
        on_sent: Callable[[int, StreamRange], None] = lambda partition, left: None,
    ) -> None:
        self._progress = progress
        self._log, self._to = PoolNames(progress.order.log_pool), PoolNames(progress.order.to_pool)
        self._streams, self._publisher = streams, publisher
        self._rate, self._clock = rate, clock
        self._on_sent = on_sent
        self._next_at = clock.monotonic()

    async def partition(self, partition: int) -> int:
        """Send the rest of a partition, and return the number of messages. Raises the errors of both connections,
        `StreamDataLostError`, and ValueError for an invalid range."""
        stream, count = self._log.log_stream(partition), 0
        if partition not in self._progress.ranges:
            self._progress.ranges[partition] = await self._range(stream)
            self._progress.save()
        wanted = self._progress.ranges[partition]
        async with aclosing(self._batches(stream, wanted)) as batches:  # type: ignore[type-var]
            async for batch in batches:
                await self._send(stream, batch)
                wanted = StreamRange(batch[-1].offset + 1, wanted.stop)
                self._progress.ranges[partition] = wanted
                # On the event loop: a file of a few hundred bytes.
                self._progress.save()
                count += len(batch)
                self._on_sent(partition, wanted)
        return count

    async def _range(self, stream: str) -> StreamRange:
        bounds = await self._streams.bounds(stream) or StreamRange(0, 0)

        async def offset_of(edge: int | str | None, default: int) -> int:
            if isinstance(edge, str):
                return await self._streams.first_after(stream, bounds, taken_from(parse_time(edge)))
            return default if edge is None else edge

        start = await offset_of(self._progress.order.begin, bounds.start)
        stop = min(await offset_of(self._progress.order.end, bounds.stop), bounds.stop)
        return StreamRange(start, max(start, stop))

    async def _batches(self, stream: str, wanted: StreamRange) -> AsyncIterator[list[StreamMessage]]:
        size = BATCH if self._rate is None else max(1, min(BATCH, int(self._rate)))
        waiting: list[StreamMessage] = []
        if wanted.start < wanted.stop:
            async with aclosing(self._streams.read(stream, wanted, prefetch=BATCH)) as several:  # type: ignore[type-var]
                async for messages in several:
                    waiting += messages
                    while len(waiting) >= size:
                        batch, waiting = waiting[:size], waiting[size:]
                        yield batch
        if waiting:
            yield waiting

    async def _send(self, stream: str, batch: list[StreamMessage]) -> None:
        """Publish in the order of the log, and wait for all confirms."""
        if self._rate is not None:
            await self._clock.sleep(self._next_at - self._clock.monotonic())
            # A late batch does not let the next ones catch up.
            self._next_at = max(self._next_at, self._clock.monotonic()) + len(batch) / self._rate
        try:
            async with asyncio.TaskGroup() as group:
                for one in batch:
                    group.create_task(self._publish(one, stream))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _publish(self, one: StreamMessage, stream: str) -> None:
        key = one.headers.get(KEY_HEADER)
        await self._publisher.publish(
            request_of(one, stream),
            exchange=self._to.requests_exchange,
            routing_key=key if isinstance(key, str) else one.routing_key,
            mandatory=True,
        )


def request_of(message: StreamMessage, stream: str) -> Message:
    """A message of the log as a one-way request. Without the deadline of the client: the pool would drop a message
    whose deadline has passed."""
    headers = {
        name: value
        for name, value in without_identity(message.headers).items()
        if not name.startswith(OWN_PREFIX) and name not in {REPLAY_HEADER, DEADLINE_HEADER}
    }
    return Message(
        message.body,
        headers=headers | {REPLAY_HEADER: f"{stream}/{message.offset}"},
        correlation_id=message.correlation_id,
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        timestamp=message.timestamp,
        message_id=message.message_id,
    )


def _shown(order: ResendOrder) -> dict[str, object]:
    return {"log_pool": order.log_pool, "to_pool": order.to_pool, "from": order.begin, "to": order.end}
