"""How far each group is behind: the number of waiting requests, the age of the oldest, and the trend of the number.

The figures of a listing come from `backlog`; here each group has a trend over the listings, by double exponential
smoothing (Holt). A group is forgotten as soon as nothing waits in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from osrdyne.aio.clock import Clock
from osrdyne.broker.management.listings import ListedQueue
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.state.queues.backlog import NOTHING, PriorityBacklog, Waiting
from osrdyne.protocol.names import Key

GROWING_LISTINGS = 5  # A warning comes after so many listings in a row, each with more waiting requests.
_LEVEL, _TREND = 0.5, 0.3  # The weights of a new value in the level and in the trend.


class HoltTrend:
    """The smoothed level of a value and its change a second."""

    def __init__(self, value: float, at: float) -> None:
        self.level, self.slope = value, 0.0
        self._at = at
        self._is_first = True

    def add(self, value: float, at: float) -> None:
        """Add a later value. A second value of the same moment is ignored."""
        passed = at - self._at
        if passed <= 0:
            return
        expected, before = self.level + self.slope * passed, self.level
        if self._is_first:
            # Two values make the first slope: there is nothing to smooth.
            self.level, self.slope, self._is_first = value, (value - before) / passed, False
        else:
            self.level = _LEVEL * value + (1 - _LEVEL) * expected
            self.slope = _TREND * (self.level - before) / passed + (1 - _TREND) * self.slope
        self._at = at

    def zero_in(self) -> float | None:
        """Seconds until the value is zero; None if it does not fall."""
        return None if self.slope >= 0 else max(0.0, self.level) / -self.slope


@dataclass(frozen=True, slots=True)
class Lag:
    """The lag of one group, or of the pool (`key` None). `seconds`: age of the oldest waiting request, None if unknown.

    `slope`: change of the number of waiting requests a second; `drained_in`: seconds until none wait at that rate, None
    if never.
    """

    key: Key | None
    messages: int
    seconds: float | None
    slope: float
    drained_in: float | None


@dataclass(slots=True)
class _Followed:
    trend: HoltTrend
    latest: int
    growing: int = 0


class GroupLags:
    """The lags of the groups in one term, as of the latest listing."""

    def __init__(self, clock: Clock, backlog: PriorityBacklog) -> None:
        self._clock = clock
        self._backlog = backlog
        self._groups: dict[Key, _Followed] = {}
        self._pool: _Followed | None = None
        self._log: Logger = get_logger("lag")

    def take_listing(self, listed: Sequence[ListedQueue]) -> None:
        """Take the figures of a listing, which the backlog has taken before."""
        now, waiting = self._clock.monotonic(), {queue.key: self._of(queue.key).requests for queue in listed}
        self._groups = {
            key: self._follow(self._groups.get(key), key, requests, now)
            for key, requests in waiting.items()
            if requests
        }
        total = sum(waiting.values())
        self._pool = self._follow(self._pool, None, total, now) if total else None

    def _follow(self, known: _Followed | None, key: Key | None, requests: int, now: float) -> _Followed:
        if known is None:
            return _Followed(HoltTrend(requests, now), requests)
        known.growing = known.growing + 1 if requests > known.latest else 0
        known.latest = requests
        known.trend.add(requests, now)
        if known.growing == GROWING_LISTINGS:
            whose = {} if key is None else {"key": key}
            self._log.warning("lag only grows", requests=requests, a_minute=round(60 * known.trend.slope, 1), **whose)
        return known

    def _of(self, key: Key) -> Waiting:
        return _sum(self._backlog.of_group(key))

    def groups(self) -> list[Lag]:
        """The groups in which requests wait, the largest lag first."""
        now = self._clock.monotonic()
        found = [_lag(key, self._of(key), one, now) for key, one in self._groups.items()]
        return sorted(found, key=lambda lag: (-(lag.seconds or 0.0), -lag.messages, lag.key or ""))

    def pool(self) -> Lag:
        """The lag of all groups together."""
        return _lag(None, _sum(self._backlog.waiting()), self._pool, self._clock.monotonic())


def _sum(levels: Mapping[int | None, Waiting]) -> Waiting:
    return sum(levels.values(), NOTHING)


def _lag(key: Key | None, waiting: Waiting, followed: _Followed | None, now: float) -> Lag:
    if followed is None:
        return Lag(key, waiting.requests, waiting.age(now), 0.0, None if waiting.requests else 0.0)
    return Lag(key, waiting.requests, waiting.age(now), followed.trend.slope, followed.trend.zero_in())
