"""The throttle of a table: a token bucket that all partitions of the table share, and its log in the table's directory.

The level of the bucket is a time, as in the generic cell rate algorithm (GCRA): `free_at` is the moment at which the
rate has paid for all blocks that were taken. If it is in the future, the bucket is overdrawn; if it is in the past, the
bucket holds the blocks of the time since then, up to `CAPACITY`.

An ingest takes the blocks of its range before it stores the range. They count once, whichever step a crash follows:

1. Take: an entry of the throttle log has the new level of the bucket, and the range with its blocks. Crash before:
   nothing is taken. After: the next ingest of the partition begins at the same offset, ignores what was taken for it,
   and takes again.
2. Commit. Crash after: the next ingest begins behind the range, and takes its own.

Entries have numbers, and two ingests never write the same one, as with commits. An ingest that is killed before its
entry has its name leaves an unfinished file; a later one removes it when the number is taken. No Spark. Source:
docs/reference/telemetry/throttle.md.
"""

from __future__ import annotations

import json
import math
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from osrdyne.amqp.stream_frames import StreamMessage
from osrdyne.protocol.rates import EventRate
from osrdyne.protocol.telemetry import ENQUEUED_HEADER
from osrdyne_worker.pipelines.telemetry.ranges import Range
from osrdyne_worker.pipelines.telemetry.table import (
    CommitConflictError,
    TableDamagedError,
    fsync_directory,
    storage_errors,
)
from osrdyne_worker.requests.scheduling.rates import count_events

THROTTLE = "_throttle"
CAPACITY = 60.0
"""Seconds. A full bucket holds the blocks of this time."""
PAUSE = CAPACITY / 2
"""Seconds of blocks that a table that is behind collects for its next ingest: fewer and larger files. The bucket is not
full by then, so no part of the rate is lost."""
MAX_SKEW = 60.0
"""Seconds by which clocks of hosts may differ. A clock that is further behind was set back."""
_KEPT = 16
_ATTEMPTS = 1_000
_FORMAT = 1
_ENTRY = re.compile(r"([0-9]{20})\.json")
_UNFINISHED = re.compile(r"\.([0-9]{20})-[0-9a-f]{32}\.tmp")


@dataclass(frozen=True, slots=True)
class Cost:
    """What one message of the log costs. `arrived`: seconds since the epoch, None if the message has no time."""

    offset: int
    blocks: int
    arrived: float | None = None

    @classmethod
    def of(cls, message: StreamMessage, rate: EventRate) -> Self:
        """An event counts as its blocks, as in a rate of workers and in plans of capacity."""
        enqueued = message.headers.get(ENQUEUED_HEADER)
        arrived = enqueued / 1000 if isinstance(enqueued, int) and not isinstance(enqueued, bool) else None
        return cls(message.offset, count_events(message.body, rate.event_bytes, arrays=True), arrived)


@dataclass(frozen=True, slots=True)
class Taken:
    """A range of a partition whose blocks are taken. `free_at_without`: `free_at` of the bucket without this range."""

    partition: int
    start: int
    stop: int
    blocks: int
    free_at_without: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """An entry of the throttle log. `free_at`: the level, in seconds since the epoch. `taken_at`: the time of the
    entry. `events_per_minute`: the rate at that time. `taken`: the last range of each partition."""

    number: int
    free_at: float
    taken_at: float
    events_per_minute: float
    taken: tuple[Taken, ...] = ()

    def at(self, partition: int, start: int) -> Taken | None:
        """The range that an ingest has taken and not stored; None without one. `start`: the end of the partition in the
        table."""
        return next((one for one in self.taken if (one.partition, one.start) == (partition, start)), None)


@dataclass(frozen=True, slots=True)
class Allowed:
    """What an ingest may store: its range to before `stop`, with its blocks. `free_at`: the level after it."""

    stop: int
    blocks: int
    free_at: float


def level(free_at: float, bucket: Bucket, rate: EventRate, now: float) -> tuple[float, float]:
    """The time that counts as now, and the level at this rate. `free_at`: that of `bucket`, or without one of its
    ranges."""
    debt = free_at - now
    if now < bucket.taken_at:
        # The clock of another host is ahead: its time counts. Otherwise each change of host would fill the bucket.
        # If the clock was set back, the debt stays the same.
        debt = free_at - bucket.taken_at
        now = now if now < bucket.taken_at - MAX_SKEW else bucket.taken_at
    if debt > 0:
        return now, now + debt * bucket.events_per_minute / rate.events_per_minute
    return now, max(now + debt, now - CAPACITY)


def fill(free_at: float, now: float, wanted: Range, costs: Iterable[Cost], rate: EventRate) -> Allowed:
    """Take the messages of a range, in order, as long as the bucket is not overdrawn; read no further than needed. A
    message is taken as a whole, so that each gets its turn."""
    taken, stop, paid_at = 0, wanted.start, free_at
    left = iter(costs)
    while paid_at <= now:
        if (cost := next(left, None)) is None:
            return Allowed(wanted.stop, taken, paid_at)
        taken += cost.blocks
        paid_at = free_at + taken * 60.0 / rate.events_per_minute
        stop = cost.offset + 1
    return Allowed(stop, taken, paid_at)


def next_after(free_at: float, now: float) -> float:
    """Seconds until the next request is worthwhile while the stream has more."""
    return max(0.0, free_at + PAUSE - now)


class ThrottleLog:
    """The throttle log of one table. Methods block, and raise `StorageError` and `TableDamagedError`."""

    def __init__(self, table: Path) -> None:
        self._table = table
        self._directory = table / THROTTLE

    def last(self) -> Bucket | None:
        """The newest entry; None before the first."""
        while True:
            numbers = self._numbers()
            if not numbers:
                return None
            if (found := self._read(numbers[-1])) is not None:
                return found

    def take(
        self, wanted: Range, costs: Iterable[Cost], *, partition: int, rate: EventRate, time: Callable[[], float]
    ) -> Allowed:
        """Take the blocks of as much of a range as the bucket has; that may be nothing. `costs`: of its messages.
        Raises `CommitConflictError` if other partitions write each next entry first."""
        costs = _ReadOnce(costs)
        for _ in range(_ATTEMPTS):
            bucket, now = self.last(), time()
            number, others, free_at = 1, list[Taken](), now
            if bucket is None:
                # A new bucket has filled since the first message arrived.
                arrived = next((one.arrived for one in costs), None)
                if arrived is not None:
                    free_at = min(now, max(arrived, now - CAPACITY))
            else:
                # A range that was taken here and not stored does not count.
                mine = bucket.at(partition, wanted.start)
                at, free_at = level(bucket.free_at if mine is None else mine.free_at_without, bucket, rate, now)
                others = [
                    replace(one, free_at_without=level(one.free_at_without, bucket, rate, now)[1])
                    for one in bucket.taken
                    if one.partition != partition
                ]
                number, now = bucket.number + 1, at
            allowed = fill(free_at, now, wanted, costs, rate)
            if allowed.stop == wanted.start:
                return allowed
            spent = allowed.free_at - free_at
            taken = (
                *(replace(one, free_at_without=one.free_at_without + spent) for one in others),
                Taken(partition, wanted.start, allowed.stop, allowed.blocks, free_at),
            )
            if self._write(Bucket(number, allowed.free_at, now, rate.events_per_minute, taken)):
                return allowed
        raise CommitConflictError(
            f"Other partitions of {self._table} have written its throttle log {_ATTEMPTS} times meanwhile; request the "
            "next ingest.",
            partition=partition,
        )

    def _write(self, bucket: Bucket) -> bool:
        """Write an entry to disk; False if its number is taken."""
        path = self._path(bucket.number)
        unfinished = self._directory / f".{bucket.number:020d}-{uuid.uuid4().hex}.tmp"
        with storage_errors(self._table):
            if not self._directory.is_dir():
                self._directory.mkdir(parents=True, exist_ok=True)
                fsync_directory(self._table)
            try:
                with unfinished.open("x", encoding="utf-8") as file:
                    json.dump({"format": _FORMAT, **asdict(bucket)}, file)
                    file.flush()
                    os.fsync(file.fileno())
                try:
                    os.link(unfinished, path)
                except FileExistsError:
                    return False
                except FileNotFoundError:
                    if max(self._numbers(), default=0) < bucket.number:
                        raise
                    # The number is taken, so another ingest has removed our unfinished entry.
                    return False
            finally:
                with suppress(OSError):
                    unfinished.unlink()
            numbers = self._numbers()
            # An ingest that was very slow may have used a number again that is removed by now. If it was only slow
            # after the link, the entries that follow have its range, and the next attempt finds it.
            if numbers[-1] > bucket.number + _KEPT // 2:
                path.unlink(missing_ok=True)
                return False
            fsync_directory(self._directory)
            for number in numbers:
                if number <= bucket.number - _KEPT:
                    self._path(number).unlink(missing_ok=True)
            self._remove_unfinished(numbers[-1])
        return True

    def _remove_unfinished(self, last: int) -> None:
        """Remove what killed ingests have left: their numbers are taken, so these entries cannot be written."""
        for path in self._directory.glob(".*.tmp"):
            if (found := _UNFINISHED.fullmatch(path.name)) is not None and int(found[1]) <= last:
                path.unlink(missing_ok=True)

    def _read(self, number: int) -> Bucket | None:
        """An entry; None if it was removed meanwhile."""
        path = self._path(number)
        with storage_errors(self._table):
            try:
                text = path.read_bytes()
            except FileNotFoundError:
                return None
        try:
            document = json.loads(text)
            if document.pop("format") != _FORMAT:
                raise ValueError("another format")
            taken = tuple(Taken(**one) for one in document.pop("taken"))
            bucket = Bucket(**document, taken=taken)
            numbers = (bucket.free_at, bucket.taken_at, bucket.events_per_minute)
            if not all(map(math.isfinite, numbers)) or bucket.events_per_minute <= 0:
                raise ValueError("a number is not possible")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TableDamagedError(
                f"{path} is not an entry of a throttle log ({error!r}). Remove it; the entry before it counts then."
            ) from None
        return bucket

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:020d}.json"

    def _numbers(self) -> list[int]:
        with storage_errors(self._table):
            try:
                names = [one.name for one in self._directory.iterdir()]
            except FileNotFoundError:
                return []
        return sorted(int(found[1]) for name in names if (found := _ENTRY.fullmatch(name)) is not None)


class _ReadOnce:
    """An iterable that can be iterated again, and reads its source once, as far as it was needed."""

    def __init__(self, source: Iterable[Cost]) -> None:
        self._source = iter(source)
        self._read: list[Cost] = []

    def __iter__(self) -> Iterator[Cost]:
        yield from self._read
        for one in self._source:
            self._read.append(one)
            yield one
