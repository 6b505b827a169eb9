"""How far each group is behind: the number of waiting requests, the age of the oldest, and the trend of the number.

The figures of a listing come from `backlog`; here each group has a trend over the listings. A group is forgotten as
soon as nothing waits in it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from osrdyne.aio.clock import Clock
from osrdyne.broker.management.listings import ListedQueue
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.state.queues.backlog import NOTHING, PriorityBacklog, Waiting
from osrdyne.protocol.names import Key

GROWING_LISTINGS = 5  # A warning comes after so many listings in a row, each with more waiting requests.
_LONGEST = 10  # Listings that one line may have.
_TURN = 3.0  # Standard deviations from the line at which a value begins a new one.
_LEAST_BENDS = 3  # A bend is the change of the change between three values.
_NOISE_OF_BENDS = 1.48 / math.sqrt(6)  # The standard deviation of normal values by the median of their bends.


class LineTrend:
    """The change of a number of requests a second: the straight line through its values since the last turn, by least
    squares. The number turns when a value is further from the line than chance explains. Without turns a burst that is
    over would show as growth for many values; the difference of the last two values alone is mostly noise (decision
    0139)."""

    def __init__(self, value: float, at: float) -> None:
        self.slope: float | None = None
        self._values = deque([(at, value)], maxlen=_LONGEST)
        self._in_line = 1  # of the latest values

    def add(self, value: float, at: float) -> None:
        """Add a later value. A second value of the same moment is ignored."""
        if at <= self._values[-1][0]:
            return
        if self._in_line > 1 and self._has_turned(value, at):
            self._in_line = 1
        self._values.append((at, value))
        self._in_line = min(self._in_line + 1, _LONGEST)
        self.slope = self._line().slope

    def zero_in(self) -> float | None:
        """Seconds after the latest value until it is zero; None if it does not fall."""
        return None if self.slope is None or self.slope >= 0 else max(0.0, self._values[-1][1]) / -self.slope

    def _line(self) -> _Line:
        points = list(self._values)[-self._in_line :]
        at, value = (sum(column) / len(points) for column in zip(*points, strict=True))
        spread = sum((when - at) ** 2 for when, _ in points)
        return _Line(sum((when - at) * (one - value) for when, one in points) / spread, at, value, spread)

    def _has_turned(self, value: float, at: float) -> bool:
        line = self._line()
        noise = self._noise() * math.sqrt(1 + 1 / self._in_line + (at - line.at) ** 2 / line.spread)
        # Of independent arrivals, as many as this number vary by its root.
        chance = math.sqrt(max(value, self._values[-1][1], 1.0))
        return abs(value - line.value - line.slope * (at - line.at)) > _TURN * max(noise, chance)

    def _noise(self) -> float:
        """The standard deviation of values around any line: by the median of their bends, which a turn does not
        change."""
        values = [value for _, value in self._values]
        triples = zip(values, values[1:], values[2:], strict=False)
        bends = [abs(first - 2 * second + third) for first, second, third in triples]
        return _NOISE_OF_BENDS * median(bends) if len(bends) >= _LEAST_BENDS else 0.0


class _Line(NamedTuple):
    """A line of this slope through a value at a time. `spread`: the sum of the squared distances of its times."""

    slope: float
    at: float
    value: float
    spread: float


@dataclass(frozen=True, slots=True)
class Lag:
    """The lag of one group, or of the pool (`key` None). `seconds`: age of the oldest waiting request, None if unknown.

    `slope`: change of the number of waiting requests a second, None after a single listing; `drained_in`: seconds until
    none wait at that rate, None if never or unknown.
    """

    key: Key | None
    messages: int
    seconds: float | None
    slope: float | None
    drained_in: float | None


@dataclass(frozen=True, slots=True)
class Lags:
    """The lags of a pool as of one listing. `as_of`: when it was taken, in seconds since the epoch; None before the
    first one, and while not leading. `pool`: of all groups together; None while not leading. `groups`: those in which
    requests wait, the largest lag first."""

    as_of: float | None = None
    pool: Lag | None = None
    groups: Sequence[Lag] = ()


@dataclass(slots=True)
class _Followed:
    trend: LineTrend
    latest: int
    growing: int = 0


class GroupLags:
    """The lags of the groups in one term, as of the latest listing."""

    def __init__(self, clock: Clock, backlog: PriorityBacklog) -> None:
        self._clock = clock
        self._backlog = backlog
        self._groups: dict[Key, _Followed] = {}
        self._pool: _Followed | None = None
        self._taken_at = clock.monotonic()
        self._as_of: float | None = None
        self._log: Logger = get_logger("lag")

    def take_listing(self, listed: Sequence[ListedQueue]) -> None:
        """Take the figures of a listing, which the backlog has taken before."""
        self._taken_at, self._as_of = self._clock.monotonic(), self._clock.time()
        now = self._taken_at
        waiting = {queue.key: self._of(queue.key).requests for queue in listed}
        self._groups = {
            key: self._follow(self._groups.get(key), key, requests, now)
            for key, requests in waiting.items()
            if requests
        }
        total = sum(waiting.values())
        self._pool = self._follow(self._pool, None, total, now) if total else None

    def _follow(self, known: _Followed | None, key: Key | None, requests: int, now: float) -> _Followed:
        if known is None:
            return _Followed(LineTrend(requests, now), requests)
        known.growing = known.growing + 1 if requests > known.latest else 0
        known.latest = requests
        known.trend.add(requests, now)
        if known.growing == GROWING_LISTINGS:
            whose = {} if key is None else {"key": key}
            a_minute = round(60 * (known.trend.slope or 0.0), 1)
            self._log.warning("lag only grows", requests=requests, a_minute=a_minute, **whose)
        return known

    def _of(self, key: Key) -> Waiting:
        return _sum(self._backlog.of_group(key))

    def current(self) -> Lags:
        """All figures, ages included, as of the latest listing."""
        groups = [_lag(key, self._of(key), one, self._taken_at) for key, one in self._groups.items()]
        groups.sort(key=lambda lag: (-(lag.seconds or 0.0), -lag.messages, lag.key or ""))
        return Lags(self._as_of, _lag(None, _sum(self._backlog.waiting()), self._pool, self._taken_at), groups)


def _sum(levels: Mapping[int | None, Waiting]) -> Waiting:
    return sum(levels.values(), NOTHING)


def _lag(key: Key | None, waiting: Waiting, followed: _Followed | None, now: float) -> Lag:
    if followed is None:
        nothing = None if waiting.requests else 0.0
        return Lag(key, waiting.requests, waiting.age(now), nothing, nothing)
    return Lag(key, waiting.requests, waiting.age(now), followed.trend.slope, followed.trend.zero_in())
