"""Keys whose requests ran when a process ended: after the second time, the key gets its own process for an hour.

The counts are in memory only: another daemon starts from zero.
"""

from __future__ import annotations

from collections.abc import Iterable

from osrdyne.aio.clock import Clock
from osrdyne.protocol.names import Key

DEATHS = 2
"""Ends of processes during requests of a key, after which it is placed alone."""
ALONE_FOR = 3600.0
"""Seconds for which a key is placed alone, and for which an end counts."""


class ProcessDeaths:
    """Counts the ends of processes by key."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends: dict[Key, list[float]] = {}

    def note(self, keys: Iterable[Key]) -> None:
        """Record that a process ended while requests of these keys ran."""
        now = self._clock.monotonic()
        self._ends = {key: recent for key, ends in self._ends.items() if (recent := _recent(ends, now))}
        for key in keys:
            self._ends.setdefault(key, []).append(now)

    def is_alone(self, key: Key) -> bool:
        """Whether the key must have its own process."""
        return len(_recent(self._ends.get(key, []), self._clock.monotonic())) >= DEATHS


def _recent(ends: Iterable[float], now: float) -> list[float]:
    return [at for at in ends if now - at < ALONE_FOR]
