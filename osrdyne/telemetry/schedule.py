"""Decide which partitions of a table are sent the next request to `/ingest`. Pure: no clock, no I/O.

Times are seconds of a monotonic clock. Source: docs/reference/telemetry/scheduler.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Self

from osrdyne.errors import InvalidMessageError
from osrdyne.telemetry.status import ReaderLag

if TYPE_CHECKING:
    from osrdyne.client.reply import Reply  # a daemon starts without the client

MIN_PAUSE = 1.0
"""Seconds until the next request to a partition if the last one stored nothing although the stream has more."""
MAX_PAUSE = 86_400.0


class Outcome(StrEnum):
    """How a request to `/ingest` ended. `conflict`: another ingest of the partition was running."""

    STORED = "stored"
    EMPTY = "empty"
    CONFLICT = "conflict"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TableRules:
    """When a table is to be written. `pool`: whose workers write it. Times in seconds. `token_file`: contains the token
    of the requests; None: requests without a token."""

    name: str
    pool: str
    target_lag: float = 60.0
    interval: float | None = None
    at_once: int = 4
    request_timeout: float = 600.0
    token_file: str | None = None

    @property
    def latest(self) -> float:
        """The longest time that messages may wait for a request."""
        return self.target_lag if self.interval is None else min(self.target_lag, self.interval)


@dataclass(frozen=True, slots=True)
class IngestAnswer:
    """The answer to `/ingest`. `next_after`: seconds until the throttle of the table allows the next ingest. `purged`:
    rows that the storage limit has removed. `old`: events that were more than a year old when they arrived.
    `table_rows`, `table_bytes`: of the whole table, if the answer has them."""

    start: int
    stop: int
    end: int
    rows: int
    invalid: int
    next_after: float = 0.0
    position_saved: bool = False
    copies: int = 0
    purged: int = 0
    old: int = 0
    table_rows: int | None = None
    table_bytes: int | None = None

    @property
    def has_more(self) -> bool:
        return self.stop < self.end

    @classmethod
    def of_reply(cls, reply: Reply, *, path: str, pool: str, remedy: str = "") -> Self:
        """The answer in a reply to `path`. Raises `InvalidMessageError`, whose text ends with `remedy`."""
        try:
            return cls.parse(reply.json())
        except ValueError as error:
            raise InvalidMessageError(
                f"This is not an answer of {path}: {error}. The workers of the pool {pool} must run "
                f"osrdyne_worker.pipelines.ingest:app{remedy}."
            ) from None

    @classmethod
    def parse(cls, document: object) -> Self:
        """Parse the body of an answer to `/ingest`. Raises ValueError if it is not one."""
        if not isinstance(document, Mapping) or not isinstance(offsets := document.get("offsets"), Mapping):
            raise ValueError("it has no offsets")
        start, stop, end = (_count(offsets.get(name)) for name in ("start", "stop", "end"))
        rows, invalid = (_count(document.get(name)) for name in ("rows", "invalid"))
        pause = document.get("next_after", 0.0)
        if isinstance(pause, bool) or not isinstance(pause, int | float) or not pause >= 0:
            raise ValueError("its next_after is not a number of seconds")
        storage = document.get("storage")
        used = storage if isinstance(storage, Mapping) else {}
        return cls(
            start,
            stop,
            end,
            rows,
            invalid,
            min(float(pause), MAX_PAUSE),
            position_saved=document.get("position_saved") is True,
            copies=_count(document.get("copies", 0)),
            purged=_count(used.get("purged", 0)),
            old=_count(document.get("old", 0)),
            table_rows=_count(used["rows"]) if "rows" in used else None,
            table_bytes=_count(used["bytes"]) if "bytes" in used else None,
        )


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("its offsets or counts are not whole numbers")
    return value


@dataclass(slots=True)
class PartitionSchedule:
    """One partition of a table. `failures`, `conflicts`: consecutive ones. `code`, `error`: of the last failure.
    `rows`, `invalid`: the sums of all answers to this schedule."""

    in_flight: bool = False
    has_more: bool = False
    not_before: float = -math.inf
    answered_at: float = -math.inf
    lag: ReaderLag | None = None
    failures: int = 0
    conflicts: int = 0
    code: str | None = None
    error: str | None = None
    rows: int = 0
    invalid: int = 0

    def is_due(self, rules: TableRules, now: float) -> bool:
        """Whether a request is due, regardless of the limit of requests in flight."""
        if self.in_flight or now < self.not_before:
            return False
        if self.has_more:
            return True
        if self.lag is None or not self.lag.messages:
            return False
        if self.lag.seconds is None or self.lag.seconds >= rules.target_lag:
            return True
        return rules.interval is not None and now - self.answered_at >= rules.interval

    @property
    def behind(self) -> float:
        """The lag of the partition in seconds; 0 without a measurement, infinite if its age is unknown."""
        return 0.0 if self.lag is None else math.inf if self.lag.seconds is None else self.lag.seconds


class TableSchedule:
    """The partitions of one table, and the order of their requests."""

    def __init__(self, rules: TableRules, *, partitions: int) -> None:
        self.rules = rules
        self.partitions = [PartitionSchedule() for _ in range(partitions)]

    @property
    def in_flight(self) -> int:
        return sum(one.in_flight for one in self.partitions)

    def observe(self, lags: Mapping[int, ReaderLag], *, since: float) -> None:
        """Use lags of a measurement that began at `since`. A partition that was answered since then is skipped: its lag
        may be from before the answer."""
        for number, one in enumerate(self.partitions):
            if not one.in_flight and one.answered_at < since:
                one.lag = lags.get(number)

    def start_due(self, now: float) -> list[int]:
        """Mark the next partitions as in flight and return them: those furthest behind first, at most `at_once` in
        flight."""
        due = [number for number, one in enumerate(self.partitions) if one.is_due(self.rules, now)]
        due.sort(key=lambda number: (-self.partitions[number].behind, self.partitions[number].answered_at, number))
        chosen = due[: max(0, self.rules.at_once - self.in_flight)]
        for number in chosen:
            self.partitions[number].in_flight = True
        return chosen

    def answered(self, partition: int, answer: IngestAnswer, now: float) -> Outcome:
        """Note an answer; the next request follows at once if the stream has more and the throttle allows it."""
        one = self._ended(partition, now)
        one.failures, one.conflicts, one.code, one.error = 0, 0, None, None
        one.rows += answer.rows
        one.invalid += answer.invalid
        one.has_more = answer.has_more
        moved = answer.stop > answer.start
        pause = answer.next_after
        if not moved:
            # No progress: wait before the next request. At the end of the stream the measured lag may be wrong, for
            # example if the worker reads another log; then one request per target lag is enough.
            pause = max(pause, MIN_PAUSE if answer.has_more else self.rules.latest)
        one.not_before = now + pause
        return Outcome.STORED if moved else Outcome.EMPTY

    def conflicted(self, partition: int, now: float, *, pause: float) -> None:
        """Note a conflict. The next measured lag includes the rows of the other ingest."""
        one = self._ended(partition, now)
        one.conflicts += 1
        one.has_more = False
        one.not_before = now + pause

    def failed(self, partition: int, now: float, *, pause: float, code: str, error: str) -> None:
        """Note a failure with its code and text."""
        one = self._ended(partition, now)
        one.failures += 1
        one.code, one.error = code, error
        # The lag is measured again before the next request.
        one.has_more = False
        one.not_before = now + pause

    def next_due(self, now: float) -> float:
        """Seconds until a partition may be due without a new measurement; `inf`: none."""
        if self.in_flight >= self.rules.at_once:
            return math.inf
        waiting = [
            one.not_before for one in self.partitions if not one.in_flight and (one.has_more or one.lag is not None)
        ]
        return max(0.0, min((at - now for at in waiting if at > now), default=math.inf))

    def _ended(self, partition: int, now: float) -> PartitionSchedule:
        one = self.partitions[partition]
        one.in_flight, one.answered_at, one.lag = False, now, None
        return one
