"""What a worker makes of its session's answers over time: whether the session is of use still. Pure; the worker asks.

Spark tells the tasks of a cancelled job to end, and some do not listen (a nested-loop join looks at nothing until it is
done): they keep their cores although the request was answered long ago, and the worker would say that it is idle.
"""

from __future__ import annotations

from dataclasses import dataclass

SILENCE_PATIENCE = 120.0
"""Seconds without an answer of the session: longer than any pause of a JVM that can still be used."""


@dataclass(slots=True)
class SessionWatch:
    """Since when (monotonic) the session has been silent, and since when it has run what nobody waits for.

    `stray_timeout`: seconds that this may last in a worker without requests; in a busy one it may four times as long.
    """

    stray_timeout: float
    silent_since: float | None = None
    stray_since: float | None = None

    def answered(self, *, alive: bool, strays: int, idle: bool, now: float) -> str | None:
        """The session answered: why it is of no use any more, or None. `idle`: no request is in the worker."""
        self.silent_since = None
        if not alive:
            return "The session of this worker is gone."
        if strays == 0:
            self.stray_since = None
            return None
        self.stray_since = now if self.stray_since is None else self.stray_since
        if now - self.stray_since < self.stray_timeout * (1 if idle else 4):
            return None
        return f"The session still runs {strays} tasks of requests that are over; they do not react to being cancelled."

    def was_silent(self, *, now: float) -> str | None:
        """The session did not answer in time: why it is of no use any more, or None."""
        self.silent_since = now if self.silent_since is None else self.silent_since
        if now - self.silent_since < SILENCE_PATIENCE:
            return None
        return f"The session of this worker has not answered for {now - self.silent_since:.0f} s."
