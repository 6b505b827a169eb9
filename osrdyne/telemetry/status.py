"""The state of the log and the lag of its readers, measured over a connection of its own.

Messages are counted by offsets, because RabbitMQ counts the messages of a stream only roughly. A few offsets have no
message (decision 0098), so a count may be slightly too high; it is 0 exactly if a reader has reached the end.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from osrdyne.aio.clock import Clock
from osrdyne.amqp import ConnectionOptions
from osrdyne.amqp.streams import StreamConnection, StreamRange
from osrdyne.errors import BrokerError
from osrdyne.findings import Finding
from osrdyne.logs import Logger, get_logger
from osrdyne.metrics import Metrics
from osrdyne.protocol.names import PoolNames
from osrdyne.protocol.telemetry import ENQUEUED_HEADER
from osrdyne.telemetry.forecast import Forecast, Sample, Trend
from osrdyne.telemetry.positions import ReaderPosition, ReaderPositions

CACHED_FOR = 2.0  # Seconds: several readers of the API cost one measurement.
METRICS_INTERVAL = 30.0
_AT_ONCE = 32
"""Concurrent reads of first messages; each has a channel of its own."""


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """One partition. `first`: the first offset, `next`: the one after the last; None and 0 if it has no message."""

    partition: int
    stream: str
    first: int | None
    next: int

    @property
    def messages(self) -> int:
        return 0 if self.first is None else self.next - self.first


@dataclass(frozen=True, slots=True)
class ReaderLag:
    """The lag of a reader in a partition. `messages`: the Message Count Lag. `seconds`: the Message Time Lag, which is
    the age of the first unread message; None if that message has no time. `lost`: offsets that the retention removed
    before they were read."""

    reader: str
    partition: int
    position: int
    messages: int
    seconds: float | None
    lost: int
    at: float


@dataclass(frozen=True, slots=True)
class TablePartition:
    """The state of one partition of a table in the scheduler. `stored`, `invalid`: events by the answers of this term.
    `failures`: consecutive ones; `code` and `error`: of the last one. `pause`: seconds until the next request at the
    earliest; None: now."""

    partition: int
    in_flight: bool
    stored: int
    invalid: int
    failures: int
    code: str | None
    error: str | None
    pause: float | None


@dataclass(frozen=True, slots=True)
class TableStatus:
    """A table of the scheduler. `target_lag`: in seconds."""

    name: str
    pool: str
    target_lag: float
    partitions: tuple[TablePartition, ...]


@dataclass(frozen=True, slots=True)
class LogStatus:
    """The log of a pool and its readers. `measured_at`: the monotonic time at which the measurement began.
    `forecasts`: by reader, once measurements span a minute."""

    name: str
    partitions: tuple[PartitionStatus, ...]
    lags: tuple[ReaderLag, ...]
    measured_at: float = 0.0
    forecasts: Mapping[str, Forecast] = field(default_factory=dict)
    tables: tuple[TableStatus, ...] = ()


class LogInspector:
    """Measures the log of one pool, for one term. `options`: of the connection that each measurement opens."""

    def __init__(
        self,
        names: PoolNames,
        *,
        options: ConnectionOptions,
        positions: ReaderPositions,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._names = names
        self._options = options
        self._positions = positions
        self._clock, self._metrics = clock, metrics
        self._busy = asyncio.Lock()
        self._latest: tuple[float, LogStatus] | None = None
        self._trends: dict[str, Trend] = {}
        self._growing: set[str] = set()
        self._log: Logger = get_logger("telemetry", pool=names.pool)

    async def status(self, name: str, partitions: int) -> LogStatus:
        """The state of a log with this number of partitions, at most `CACHED_FOR` seconds old. Raises `BrokerError`."""
        async with self._busy:
            if self._latest is None or self._clock.monotonic() - self._latest[0] > CACHED_FOR:
                self._latest = (self._clock.monotonic(), await self._measure(name, partitions))
            return self._latest[1]

    async def run(self, name: str, partitions: int) -> None:
        """Keep the metrics of lag. Runs until cancelled."""
        while True:
            try:
                # Only if there are readers: a measurement reads the end of each stream.
                if await self._positions.load():
                    self._note(await self.status(name, partitions))
                else:
                    self._forget_others(())
                    self._clear_metrics()
            except BrokerError as error:
                self._log.warning("lag of the log not known", error=str(error))
            except Exception:  # the lag is only shown: an unexpected error must not end the leader's term
                self._log.exception("unexpected error while measuring the lag of the log")
            await self._clock.sleep(METRICS_INTERVAL)

    def _clear_metrics(self) -> None:
        self._metrics.telemetry_lag_messages.clear()
        self._metrics.telemetry_lag_seconds.clear()
        self._metrics.telemetry_lag_drained.clear()

    def _note(self, status: LogStatus) -> None:
        self._clear_metrics()
        for one in status.lags:
            labels = {"reader": one.reader, "partition": str(one.partition)}
            self._metrics.telemetry_lag_messages.labels(**labels).set(one.messages)
            if one.seconds is not None:
                self._metrics.telemetry_lag_seconds.labels(**labels).set(one.seconds)
        for reader, forecast in status.forecasts.items():
            self._metrics.telemetry_lag_drained.labels(reader=reader).set(forecast.drained)

    async def _measure(self, name: str, partitions: int) -> LogStatus:
        began = self._clock.monotonic()
        positions = await self._positions.load()
        async with await StreamConnection.open(self._options, silence=self._options.rpc_timeout) as streams:
            found = await asyncio.gather(*(self._partition(streams, one) for one in range(partitions)))
            free = asyncio.Semaphore(_AT_ONCE)
            lags = await asyncio.gather(*(self._lag(free, streams, who, one) for who in positions for one in found))
        return LogStatus(name, tuple(found), tuple(lags), began, self._forecasts(found, lags, began))

    def finding(self) -> Finding | None:
        """The finding for `status`; None while no lag grows."""
        if not self._growing:
            return None
        return Finding("telemetry lag", False, f"the lag of {', '.join(sorted(self._growing))} only grows", fatal=False)

    def _forecasts(
        self, partitions: Sequence[PartitionStatus], lags: Sequence[ReaderLag], now: float
    ) -> dict[str, Forecast]:
        received, found = sum(one.next for one in partitions), {}
        readers = {one.reader for one in lags}
        self._forget_others(readers)
        for reader in readers:
            trend = self._trends.setdefault(reader, Trend())
            waiting = sum(one.messages for one in lags if one.reader == reader)
            trend.add(Sample(now, received, received - waiting))
            if (forecast := trend.forecast()) is not None:
                found[reader] = forecast
                self._report(reader, forecast, waiting)
        return found

    def _forget_others(self, readers: Collection[str]) -> None:
        """Forget readers whose positions were removed: nothing would end the finding about them."""
        self._trends = {reader: trend for reader, trend in self._trends.items() if reader in readers}
        self._growing.intersection_update(readers)

    def _report(self, reader: str, forecast: Forecast, messages: int) -> None:
        """Log once that a lag only grows, and once that it no longer does."""
        facts = {"reader": reader, "messages": messages, "rate_in": round(forecast.rate_in, 1)}
        facts["rate_out"] = round(forecast.rate_out, 1)
        if forecast.grows and reader not in self._growing:
            self._growing.add(reader)
            drained = "never" if math.isinf(forecast.drained) else f"in {forecast.drained:.0f} s"
            self._log.warning("lag of a reader only grows", drained=drained, **facts)
        elif reader in self._growing and (not messages or forecast.rate_out > forecast.rate_in):
            self._growing.discard(reader)
            self._log.info("lag of a reader no longer grows", **facts)

    async def _partition(self, streams: StreamConnection, partition: int) -> PartitionStatus:
        stream = self._names.log_stream(partition)
        bounds = await streams.bounds(stream)
        if bounds is None:
            return PartitionStatus(partition, stream, None, 0)
        return PartitionStatus(partition, stream, bounds.start, bounds.stop)

    async def _lag(
        self, free: asyncio.Semaphore, streams: StreamConnection, reader: ReaderPosition, one: PartitionStatus
    ) -> ReaderLag:
        stored = reader.offsets.get(one.partition, 0)
        start = max(stored, one.first or 0)
        # The next offset of an empty stream is unknown: the retention may have removed all messages.
        messages = max(0, one.next - start)
        seconds: float | None = 0.0
        if messages:
            async with free:
                seconds = await self._age(streams, one.stream, StreamRange(start, one.next))
        lost = start - stored if one.first is not None and one.partition in reader.offsets else 0
        return ReaderLag(reader.reader, one.partition, stored, messages, seconds, lost, reader.at)

    async def _age(self, streams: StreamConnection, stream: str, unread: StreamRange) -> float | None:
        """The age of the first message of a range; None if that message has no time."""
        async with aclosing(streams.read(stream, unread, prefetch=1, fail_on_data_loss=False)) as several:  # type: ignore[type-var]
            async for messages in several:
                enqueued = messages[0].headers.get(ENQUEUED_HEADER)
                return max(0.0, self._clock.time() - enqueued / 1000) if isinstance(enqueued, int) else None
        return 0.0


def total_lag(lags: Sequence[ReaderLag]) -> tuple[int, float | None]:
    """The messages of all partitions together, and the age of the oldest of them; None if unknown."""
    known = [one.seconds for one in lags if one.seconds is not None]
    return sum(one.messages for one in lags), max(known, default=None)
