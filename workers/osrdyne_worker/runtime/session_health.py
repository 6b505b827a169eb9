"""What a worker makes of its session's answers over time: whether the session is of use still. Pure; the worker asks.

Spark tells the tasks of a cancelled job to end, and some do not listen (a nested-loop join looks at nothing until it is
done): they keep their cores although the request was answered long ago, and the worker would say that it is idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SILENCE_PATIENCE = 120.0
"""Seconds without an answer of the session: longer than any pause of a JVM that can still be used."""


LOOKS = 3
"""How often at least a group is seen to have tasks before the worker ends for it: what Spark tells may be late."""


@dataclass(slots=True)
class _Stray:
    """A group of jobs that is over and was seen to have tasks all the same: since when, and how often."""

    since: float
    looks: int = 0


@dataclass(slots=True)
class SessionWatch:
    """Since when (monotonic) the session has been silent, and since when it has run what nobody waits for.

    `stray_timeout`: seconds that this may last in a worker without requests; in a busy one it may four times as long.
    They are counted for each group of jobs: in a busy worker there may always be one that is just being cancelled.
    """

    stray_timeout: float
    silent_since: float | None = None
    _strays: dict[str, _Stray] = field(default_factory=dict)

    def answered(self, *, alive: bool, strays: Mapping[str, int], idle: bool, now: float) -> str | None:
        """The session answered: why it is of no use any more, or None. `idle`: no request is in the worker."""
        self.silent_since = None
        if not alive:
            return "The session of this worker is gone."
        self._strays = {group: self._strays.get(group, _Stray(now)) for group in strays}
        for stray in self._strays.values():
            stray.looks += 1
        limit = self.stray_timeout * (1 if idle else 4)
        if not any(stray.looks >= LOOKS and now - stray.since >= limit for stray in self._strays.values()):
            return None
        count = sum(strays.values())
        return f"The session still runs {count} tasks of requests that are over; they do not react to being cancelled."

    def was_silent(self, *, now: float) -> str | None:
        """The session did not answer in time: why it is of no use any more, or None."""
        self.silent_since = now if self.silent_since is None else self.silent_since
        if now - self.silent_since < SILENCE_PATIENCE:
            return None
        return f"The session of this worker has not answered for {now - self.silent_since:.0f} s."
