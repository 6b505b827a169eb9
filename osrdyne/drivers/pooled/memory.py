"""Memory pressure: which hosts and cgroups of processes are short of memory, and what to end in them. No I/O.

Each process reports the memory of its host, or of its cgroup if that is tighter, and a name for it (`scope`): processes
of one host report the same scope. `PooledDriver` writes it; `osrdyne.pool.groups.memory` acts on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from osrdyne.drivers.pooled.process import Process
from osrdyne.protocol.pooled import HOST_SCOPE, Assignment

HYSTERESIS = 0.05
"""The share by which the use must fall below `max_memory_used` until the pressure is over."""
SINGLE_AGE = 600.0
"""Seconds for which a process that is alone in its cgroup is not replaced because of its memory."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """A host or cgroup that is short of memory.

    `idle`: the workers without requests in its processes, the least recently used first. `is_relieved`: a process there
    is ending or being replaced, so that its memory will be free.
    """

    scope: str
    share: float
    idle: Sequence[Assignment]
    is_relieved: bool


class MemoryPressure:
    """The scopes that are short of memory, with hysteresis."""

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._short: set[str] = set()

    def update(self, processes: Iterable[Process]) -> tuple[set[str], set[str]]:
        """Update from the latest reports. Returns the scopes where a shortage has begun, and those where it is over."""
        shares = _shares(processes)
        before, limit = self._short, self._limit
        if limit is None:
            return set(), set()
        self._short = {
            scope
            for scope, share in shares.items()
            if share >= limit or (scope in before and share >= limit - HYSTERESIS)
        }
        for process in processes:
            at = process.memory_limit
            process.short_of_memory = at is not None and at.scope in self._short
        return self._short - before, before - self._short

    def shortages(self, processes: Iterable[Process]) -> list[Shortage]:
        """Every scope that is short of memory."""
        living = [process for process in processes if not process.is_gone]
        shares = _shares(living)
        return [self._shortage(scope, share, living) for scope, share in shares.items() if scope in self._short]

    def _shortage(self, scope: str, share: float, living: Sequence[Process]) -> Shortage:
        there = _of_scope(living, scope)
        idle = [
            worker
            for process in there
            for worker in process.assignments()
            if process.runs(worker.worker_id) and not worker.in_flight and worker.worker_id not in process.stopping
        ]
        return Shortage(
            scope,
            share,
            sorted(idle, key=lambda worker: worker.last_used),
            any(process.closing or process.retiring is not None for process in there),
        )

    def to_end(self, scope: str, processes: Iterable[Process], *, now: float) -> Process | None:
        """The process to replace: the least loaded one of several, or an old one that is alone in its cgroup. `now`:
        seconds since the epoch.

        The only process of a host is not replaced: its successor would come to the same host.
        """
        there = [process for process in _of_scope(processes, scope) if process.takes_workers and process.load > 0]
        old = [process for process in there if now - process.instance.started_at >= SINGLE_AGE]
        if len(there) < 2 and (scope.startswith(HOST_SCOPE) or not old):
            return None
        return min(there, key=lambda process: (process.load, process.instance.started_at), default=None)


def _shares(processes: Iterable[Process]) -> dict[str, float]:
    """The used share of each scope, from the latest report of it."""
    latest: dict[str, tuple[float, float]] = {}
    for process in processes:
        limit = process.memory_limit
        if limit is not None and not process.is_gone:
            latest[limit.scope] = max(latest.get(limit.scope, (float("-inf"), 0.0)), (process.heard_at, limit.share))
    return {scope: share for scope, (_, share) in latest.items()}


def _of_scope(processes: Iterable[Process], scope: str) -> list[Process]:
    return [
        process
        for process in processes
        if not process.is_gone and process.memory_limit is not None and process.memory_limit.scope == scope
    ]
