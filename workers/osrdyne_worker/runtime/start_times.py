"""How long the parts of a worker's cold start took. Reported with `ready`, and shown by `osrdyne groups show`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

START_TIME_FIELD = 19
"""Index of `starttime` in /proc/PID/stat, after the name of the program, which may hold blanks."""


class StartTimes:
    """The milliseconds of each part, in the order in which the parts began."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._parts: dict[str, int] = {}

    def note(self, part: str, seconds: float) -> None:
        self._parts[part] = max(0, round(seconds * 1000))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure a part."""
        began = self._monotonic()
        try:
            yield
        finally:
            self.note(name, self._monotonic() - began)

    def milliseconds(self) -> Mapping[str, int]:
        return dict(self._parts)


def process_age() -> float | None:
    """Seconds since this process was created; None if the system is not Linux."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        started = int(fields[START_TIME_FIELD]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return None
