"""The day of a quota: from one 00:00 UTC to the next, also if the wall clock is changed meanwhile. Pure.

The day is measured by the monotonic clock. A small correction of the wall clock moves the end of the day. A jump does
not: the day ends when it would have ended, and the next one ends at midnight of the new time. Its quota is proportional
to its length. So a jump neither adds nor removes a day's quota.
"""

from __future__ import annotations

from dataclasses import dataclass

DAY = 86_400.0
SHORTEST = 3_600.0  # Seconds; a shorter day is added to the next one.
MAX_CORRECTION = 900.0  # Seconds by which the wall clock may be corrected in a day without being a jump.


@dataclass(frozen=True, slots=True)
class Moment:
    """The same moment on both clocks, in seconds."""

    monotonic: float
    wall: float

    @property
    def offset(self) -> float:
        return self.wall - self.monotonic


@dataclass(frozen=True, slots=True)
class StoredWindow:
    """The stored form of a window. `saved_at`: seconds since the epoch."""

    saved_at: float
    remaining: float
    scale: float


class DayWindow:
    """The current day. `scale`: the part of a day's quota that it has."""

    def __init__(self, now: Moment) -> None:
        self._ends = self._base = self._followed = 0.0
        self.scale = 1.0
        self._begin(now)

    @classmethod
    def restored(cls, stored: StoredWindow, now: Moment) -> tuple[DayWindow, bool]:
        """The stored window and True; a new one and False if the stored day has ended."""
        window = cls(now)
        elapsed = now.wall - stored.saved_at
        # An earlier time than that of the snapshot: the clock of another host, or a jump. No time has passed then.
        remaining = min(stored.remaining, DAY + SHORTEST + MAX_CORRECTION) - max(0.0, elapsed)
        if remaining <= 0:
            return window, False
        window._ends, window.scale = now.monotonic + remaining, stored.scale
        return window, True

    def advance(self, now: Moment) -> bool:
        """Follow the clocks. Returns whether a new day has begun."""
        # A correction moves the end, so that the day ends at midnight of the corrected clock.
        is_jump = abs(now.offset - self._base) > MAX_CORRECTION
        if not is_jump and now.offset != self._followed:
            self._ends -= now.offset - self._followed
            self._followed = now.offset
        if now.monotonic < self._ends:
            return False
        after_jump = not _is_midnight(self._ends + now.offset)
        self._begin(now)
        if after_jump and self.remaining(now) < SHORTEST:
            self._ends += DAY
        self.scale = self.remaining(now) / DAY if after_jump else 1.0
        return True

    def _begin(self, now: Moment) -> None:
        """End the day at the next midnight. It has begun at one, unless the clock has jumped."""
        self._ends = now.monotonic + DAY - now.wall % DAY
        self._base = self._followed = now.offset

    def remaining(self, now: Moment) -> float:
        """Seconds until the day ends."""
        return max(0.0, self._ends - now.monotonic)

    def store(self, now: Moment) -> StoredWindow:
        return StoredWindow(now.wall, self.remaining(now), self.scale)


def _is_midnight(wall: float) -> bool:
    return min(wall % DAY, DAY - wall % DAY) <= MAX_CORRECTION
