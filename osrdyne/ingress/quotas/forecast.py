"""Forecasts of when a daily quota will be used up, and the record of use that they are based on. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from osrdyne.ingress.quotas.window import DAY

SLOTS = 96  # Of a day, 15 minutes each.
SLOT = DAY / SLOTS
KEPT_DAYS = 7
NOON = SLOTS // 2  # At the beginning of this slot the total of the day is forecast, to be compared with it later.
FAST, SLOW = 300.0, 7_200.0  # Time constants of the moving rates, seconds.


class MovingRate:
    """An exponential moving average of an amount a second, unbiased from the first second on."""

    def __init__(self, constant: float) -> None:
        self._constant = constant
        self._since: float | None = None
        self._at = self._sum = 0.0

    def add(self, amount: float, now: float) -> None:
        if self._since is None:
            self._since = self._at = now
        self._sum = self._decayed(now) + amount
        self._at = max(self._at, now)

    def _decayed(self, now: float) -> float:
        return self._sum * math.exp(-max(0.0, now - self._at) / self._constant)

    def rate(self, now: float) -> float:
        """The amount a second; 0 before a second has passed."""
        if self._since is None or now - self._since < 1.0:
            return 0.0
        # The sum that a constant rate of one would have by now.
        weight = self._constant * (1.0 - math.exp(-(now - self._since) / self._constant))
        return self._decayed(now) / weight


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds until a quota is used up: by each of the two moving rates, and by the use at the same times of earlier
    days. None: not today. `yesterdays_error`: the error of the total forecast at noon, as a share of the real total."""

    earliest: float | None
    latest: float | None
    by_history: float | None
    yesterdays_error: float | None


class UsageRecord:
    """Blocks and messages of a day by slot, of this day and earlier ones, and the two moving rates."""

    def __init__(self) -> None:
        self.days: deque[list[list[int]]] = deque(maxlen=KEPT_DAYS)
        """Of each earlier day: blocks, messages and bytes by slot."""
        self.today: list[list[int]] = _empty()
        self.noon_forecast: float | None = None
        self.yesterdays_error: float | None = None
        self._fast, self._slow = MovingRate(FAST), MovingRate(SLOW)

    def add(self, amount: int, size_bytes: int, *, remaining: float, now: float) -> None:
        """Count a message. `remaining`: seconds of the day; `now`: monotonic."""
        slot = slot_of(remaining)
        if slot >= NOON and self.noon_forecast is None:
            self.noon_forecast = self._total(remaining, now)
        blocks, messages, sizes = self.today
        blocks[slot] += amount
        messages[slot] += 1
        sizes[slot] += size_bytes
        self._fast.add(amount, now)
        self._slow.add(amount, now)

    @property
    def rows(self) -> list[list[list[int]]]:
        """A copy of all days, this one last."""
        return [[list(row) for row in day] for day in (*self.days, self.today)]

    @property
    def used(self) -> int:
        """Blocks of this day."""
        return sum(self.today[0])

    def _total(self, remaining: float, now: float) -> float:
        rest = self._usual_rest(remaining)
        return self.used + (self._slow.rate(now) * remaining if rest is None else rest)

    def _usual_rest(self, remaining: float) -> float | None:
        """The average use in the rest of earlier days; None before there are two."""
        if len(self.days) < 2:
            return None
        slot = slot_of(remaining)
        share = remaining / SLOT - (SLOTS - slot - 1)  # of the present slot that is left
        totals = [sum(day[0][slot + 1 :]) + share * day[0][slot] for day in self.days]
        return sum(totals) / len(totals)

    def begin_day(self, limit: float | None) -> None:
        """End the day and begin the next one. `limit`: its quota; a forecast above it counts as the quota."""
        if self.noon_forecast is not None and self.used:
            expected = self.noon_forecast if limit is None else min(self.noon_forecast, limit)
            self.yesterdays_error = (expected - self.used) / self.used
        else:
            self.yesterdays_error = None
        self.days.append(self.today)
        self.today, self.noon_forecast = _empty(), None

    def forecast(self, left: float, *, remaining: float, now: float) -> Forecast:
        """The forecast of when `left` more blocks will be used."""
        if left <= 0:
            return Forecast(0.0, 0.0, 0.0, self.yesterdays_error)
        times = [left / rate if (rate := one.rate(now)) > 0 else math.inf for one in (self._fast, self._slow)]
        earliest, latest = (time if time < remaining else None for time in (min(times), max(times)))
        return Forecast(earliest, latest, self._usual_end(left, remaining), self.yesterdays_error)

    def _usual_end(self, left: float, remaining: float) -> float | None:
        if len(self.days) < 2:
            return None
        slot, passed = slot_of(remaining), 0.0
        length = remaining - SLOT * (SLOTS - slot - 1)
        for one in range(slot, SLOTS):
            usual = sum(day[0][one] for day in self.days) / len(self.days) * length / SLOT
            if usual >= left:
                return passed + length * left / usual
            left, passed, length = left - usual, passed + length, SLOT
        return None


def slot_of(remaining: float) -> int:
    """The slot of the day that has this many seconds left; a day that is longer begins with a longer first slot."""
    return min(SLOTS - 1, max(0, int((DAY - remaining) / SLOT)))


def _empty() -> list[list[int]]:
    return [[0] * SLOTS for _ in range(3)]
