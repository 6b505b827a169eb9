"""Decides from the answers of a session, over time, whether the session is still usable. Pure; the worker polls.

Spark asks the tasks of a cancelled job to stop, and some tasks do not check (a nested-loop join checks only at its
end). They keep their cores long after the request was answered, while the worker would report that it is idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SILENCE_TIMEOUT = 120.0
"""Seconds without an answer of the session: longer than any pause of a usable JVM."""

MIN_CHECKS = 3
"""How often a group must be seen with tasks before the worker exits because of it: Spark's figures may be late."""


@dataclass(slots=True)
class _StrayGroup:
    """A group of jobs that is over and still has tasks: since when (monotonic), and in how many checks."""

    since: float
    checks: int = 0


@dataclass(slots=True)
class SessionHealth:
    """Since when (monotonic) the session has not answered, and since when it has run stray tasks.

    `stray_timeout`: seconds that stray tasks may run in a worker without requests; four times as long in a busy one.
    The time counts for each group of jobs: a busy worker may always have a group that is just being cancelled.
    """

    stray_timeout: float
    silent_since: float | None = None
    _strays: dict[str, _StrayGroup] = field(default_factory=dict)

    def answered(self, *, strays: Mapping[str, int], idle: bool, now: float) -> str | None:
        """Record an answer; why the session is unusable, or None. `idle`: the worker has no request."""
        self.silent_since = None
        self._strays = {group: self._strays.get(group, _StrayGroup(now)) for group in strays}
        for stray in self._strays.values():
            stray.checks += 1
        limit = self.stray_timeout * (1 if idle else 4)
        if not any(stray.checks >= MIN_CHECKS and now - stray.since >= limit for stray in self._strays.values()):
            return None
        count = sum(strays.values())
        return f"The session still runs {count} tasks of requests that are over; they do not react to being cancelled."

    def timed_out(self, *, now: float) -> str | None:
        """Record a missing answer; why the session is unusable, or None."""
        self.silent_since = now if self.silent_since is None else self.silent_since
        if now - self.silent_since < SILENCE_TIMEOUT:
            return None
        return f"The session of this worker has not answered for {now - self.silent_since:.0f} s."
