"""The last-value reader: reads all partitions of the log and writes the newest event of each series to the store.

Run by `osrdyne last-value` and `osrdyne dev`. Values and the position after them are written in one transaction, so the
reader may end at any point. After any error a new session begins at the positions in the store. Only messages of the
current session are in memory, and reading stops while the store cannot be used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NoReturn

from osrdyne.aio.clock import Backoff, Clock, SystemClock
from osrdyne.aio.tasks import Threads
from osrdyne.amqp import ConnectionOptions
from osrdyne.amqp.stream_frames import StreamMessage
from osrdyne.amqp.streams import StreamConnection, StreamRange
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.session import connection_options
from osrdyne.broker.topology.telemetry import plan_log, streams_of
from osrdyne.config.models import Settings, TelemetrySettings
from osrdyne.errors import BrokerError, BrokerNotFoundError, ConfigurationError, OsrdyneError
from osrdyne.logs import Logger, get_logger
from osrdyne.protocol.event_mapping import mapping_from_settings
from osrdyne.protocol.names import PoolNames
from osrdyne.telemetry.last_values.query import open_store
from osrdyne.telemetry.last_values.store import LastValueStore
from osrdyne.telemetry.last_values.values import READER, Counts, fold, pieces
from osrdyne.telemetry.positions import PositionStore, ReaderPosition

PREFETCH = 1_000
PIECE_BYTES = 4 * 2**20
BATCH_MESSAGES, BATCH_BYTES = 5_000, 16 * 2**20
"""Limits of one transaction; a single message may be larger. A transaction has less if less has arrived."""
POSITION_INTERVAL = 5.0
STREAM_RETRY = 1.0
END_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class _Piece:
    """Messages of one partition that were read. `lost`: offsets before them that were removed unread."""

    partition: int
    messages: Sequence[StreamMessage]
    lost: int

    @property
    def size(self) -> int:
        return sum(len(message.body) for message in self.messages)


async def run_reader(settings: Settings) -> NoReturn:
    """Run the reader of the pool that the settings name, until cancelled. Raises `ConfigurationError`."""
    store, clock = open_store(settings, create=True), SystemClock()
    async with ManagementClient(settings.broker, clock=clock) as management:
        await LastValueReader(
            PoolNames(settings.pool.id),
            settings.telemetry,
            store=store,
            options=connection_options(settings, purpose=READER, heartbeat=settings.broker.heartbeat),
            management=management,
            retry_interval=settings.broker.retry_interval,
            clock=clock,
        ).run()


class LastValueReader:
    """The reader of one pool's log. `options`: of its stream connection."""

    def __init__(
        self,
        names: PoolNames,
        settings: TelemetrySettings,
        *,
        store: LastValueStore,
        options: ConnectionOptions,
        management: ManagementClient,
        retry_interval: float,
        clock: Clock,
    ) -> None:
        self._names, self._settings = names, settings
        self._mapping = mapping_from_settings(settings.last_values.mapping)
        self._store = store
        self._options = options
        self._management = management
        self._reported = PositionStore(management, pool=names.pool)
        self._clock = clock
        # One at a time: a call of an ended session may still be running.
        self._threads = Threads("last values", limit=1)
        self._backoff = Backoff(initial=0.2, maximum=retry_interval)
        self._failures = 0
        self._positions: dict[int, int] = {}
        self._log: Logger = get_logger("last-value", pool=names.pool)

    async def run(self) -> NoReturn:
        """Read until cancelled. Retries after every error, with a growing pause."""
        try:
            while True:
                try:
                    await self._session()
                except ConfigurationError:
                    raise
                except Exception as error:
                    self._failures += 1
                    self._report(error)
                await self._clock.sleep(self._backoff.delay(self._failures))
        finally:
            await asyncio.to_thread(self._threads.join, END_TIMEOUT)
            self._store.close()

    async def _session(self) -> None:
        """Read from the stored positions until an error."""
        self._positions = await self._threads.run(self._store.positions)
        partitions = await self._partitions()
        async with await StreamConnection.open(self._options, silence=self._options.rpc_timeout) as streams:
            self._log.info("reading the log", partitions=partitions, positions=dict(sorted(self._positions.items())))
            # One place for each partition: reading pauses while the store writes.
            queue: asyncio.Queue[_Piece] = asyncio.Queue(maxsize=partitions)
            async with asyncio.TaskGroup() as group:
                for partition in range(partitions):
                    group.create_task(self._read(streams, partition, queue), name=f"log partition {partition}")
                group.create_task(self._write(queue), name="last values")
                group.create_task(self._report_positions(), name="position of the reader")

    async def _partitions(self) -> int:
        """The number of partitions that the log has, or will have. Raises `BrokerError`."""
        listed = await self._management.list_queues(self._names.log_stream_prefix)
        plan = plan_log(self._names, self._settings, streams_of(self._names, listed))
        if not plan.partitions:
            raise BrokerError(plan.conflicts[0] if plan.conflicts else "The pool has no log: set telemetry.name.")
        return plan.partitions

    async def _read(self, streams: StreamConnection, partition: int, queue: asyncio.Queue[_Piece]) -> NoReturn:
        """Read one partition. A stream that cannot be read does not stop the others."""
        stream, reported = self._names.log_stream(partition), False
        position = self._positions.get(partition)
        while True:
            try:
                position = await self._start(streams, stream, position)
                lost: list[StreamRange] = []
                async with aclosing(
                    streams.follow(stream, position, prefetch=PREFETCH, on_lost=lost.append)
                ) as several:
                    async for messages in several:
                        reported = False
                        for piece in pieces(messages, most_bytes=PIECE_BYTES):
                            gap = self._take_lost(stream, lost)
                            await queue.put(_Piece(partition, piece, gap))
                            position = piece[-1].offset + 1
            except BrokerError as error:
                if streams.is_closed:
                    raise
                if not reported and not isinstance(error, BrokerNotFoundError):
                    self._log.warning("partition of the log not readable", stream=stream, error=str(error))
                    reported = True
            await self._clock.sleep(STREAM_RETRY)

    async def _start(self, streams: StreamConnection, stream: str, position: int | None) -> int | None:
        """The offset to begin at. A stream that ends before the position was deleted and declared again."""
        if not position:
            return position
        end = await streams.next_offset(stream)
        if end is not None and end >= position:
            return position
        # Reading more than necessary changes no value.
        if end is not None:
            self._log.warning(
                "stream was declared again, and is read from its first message",
                stream=stream,
                position=position,
                end=end,
            )
        return 0 if end is not None else None

    def _take_lost(self, stream: str, lost: list[StreamRange]) -> int:
        total = sum(one.stop - one.start for one in lost)
        for one in lost:
            self._log.warning(
                "messages were removed by the retention before they were read",
                stream=stream,
                first=one.start,
                last=one.stop - 1,
                remedy="keep the reader running, or give the log more telemetry.max_bytes and max_age",
            )
        lost.clear()
        return total

    async def _write(self, queue: asyncio.Queue[_Piece]) -> NoReturn:
        """Write the messages that have arrived whenever the last transaction has ended."""
        while True:
            batch = [await queue.get()]
            messages, size = len(batch[0].messages), batch[0].size
            while messages < BATCH_MESSAGES and size < BATCH_BYTES and not queue.empty():
                batch.append(queue.get_nowait())
                messages, size = messages + len(batch[-1].messages), size + batch[-1].size
            counts = await self._threads.run(partial(self._store_batch, batch))
            self._failures = 0
            for piece in batch:
                self._positions[piece.partition] = piece.messages[-1].offset + 1
            if counts.future or counts.invalid:
                self._log.debug(
                    "events with wrong times or invalid events", future=counts.future, invalid=counts.invalid
                )

    def _store_batch(self, batch: Sequence[_Piece]) -> Counts:
        """Parse and write a batch. Called in a thread."""
        return self._store.write(
            [
                fold(
                    (message for piece in several for message in piece.messages),
                    partition=partition,
                    next_offset=several[-1].messages[-1].offset + 1,
                    max_future=self._settings.last_values.max_future,
                    lost=sum(piece.lost for piece in several),
                    mapping=self._mapping,
                )
                for partition, several in _by_partition(batch)
            ]
        )

    async def _report_positions(self) -> NoReturn:
        """Store the positions in RabbitMQ, where `osrdyne telemetry lag` finds them."""
        stored: dict[int, int] | None = None
        while True:
            if self._positions != stored:
                offsets = dict(self._positions)
                try:
                    await self._reported.save(ReaderPosition(READER, offsets, self._clock.time()))
                    stored = offsets
                except BrokerError as error:
                    self._log.warning("position of the reader not stored", error=str(error))
            await self._clock.sleep(POSITION_INTERVAL)

    def _report(self, error: BaseException) -> None:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, OsrdyneError):
            self._log.warning("last values not written; trying again", error=str(error))
        else:
            self._log.error("unexpected error of the last-value reader", exc_info=error)


def _by_partition(batch: Sequence[_Piece]) -> Iterator[tuple[int, list[_Piece]]]:
    for partition, several in groupby(sorted(batch, key=lambda piece: piece.partition), key=lambda one: one.partition):
        yield partition, list(several)
