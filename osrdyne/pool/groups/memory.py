"""Memory of pooled processes: idle groups are retired while the heap of a process is too full, or its host or cgroup is
short of memory; and all groups of an idle process that is needed for a group with other settings or placed alone.

One group of a process or host at a time, because its memory is free only after its worker has ended and the JVM has
collected its garbage. A retired group is unbound and proven empty like any other; its next request starts it again,
possibly in another process. If memory is short and no group is idle, the least loaded process is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from osrdyne.drivers.pooled.memory import Shortage
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.state.groups.tracker import PoolStateTracker
from osrdyne.protocol.names import Key
from osrdyne.protocol.pooled import STATE_INTERVAL, Assignment

HEAP_INTERVAL = 15.0
"""Seconds between two checks of the heaps. A worker that was used within this time stays."""
POLL_INTERVAL = STATE_INTERVAL
"""Seconds between two checks of hosts and cgroups: no more often than processes report."""
REPLACE_PAUSE = 120.0
"""Seconds between two replacements of processes of one host or cgroup: the effect of the first must show."""


class Processes(Protocol):
    """The part of the pooled driver that memory relief uses."""

    def crowded(self) -> Sequence[Sequence[Assignment]]:
        """For each process with a full heap: its idle workers, the least recently used first."""
        ...

    def full(self) -> Sequence[Sequence[Assignment]]:
        """For each settings for which starts wait for a place: the idle workers that have one, as in `crowded`."""
        ...

    def vacatable(self) -> Sequence[Sequence[Assignment]]:
        """The idle workers of each process that could become empty for a start that waits, the best one first."""
        ...

    def shortages(self) -> Sequence[Shortage]:
        """The hosts and cgroups that are short of memory."""
        ...

    def replace_one(self, scope: str) -> bool:
        """Replace the least loaded process of a host or cgroup. False if none can be replaced."""
        ...


class MemoryRelief:
    """Retires groups, and has processes replaced, in one term."""

    def __init__(
        self,
        context: TermContext,
        *,
        tracker: PoolStateTracker,
        processes: Processes | None,
        at_rest: Callable[[Key], bool],
        rank: Callable[[Key], int],
    ) -> None:
        """`at_rest`: whether all workers of a group are ready and have no work. `rank`: groups of the lowest rank are
        retired first."""
        self._tracker = tracker
        self._processes = processes
        self._at_rest = at_rest
        self._rank = rank
        self._clock = context.clock
        self._metrics = context.metrics
        self._next_heaps = self._clock.monotonic() + HEAP_INTERVAL
        self._replaced_at: dict[str, float] = {}
        self._log: Logger = get_logger("memory_relief")

    async def run(self) -> None:
        """Check at intervals. Runs until cancelled."""
        while True:
            await self._clock.sleep(POLL_INTERVAL)
            self.relieve()

    def relieve(self) -> None:
        """Retire one group of each process whose heap is full, and of each host or cgroup that is short of memory,
        unless one of them is ending already."""
        processes, now = self._processes, self._clock.monotonic()
        if processes is None:
            return
        if now >= self._next_heaps:
            self._next_heaps = now + HEAP_INTERVAL
            for workers in processes.crowded():
                if self._retire_idle(workers, why="the heap of its process is full"):
                    self._metrics.memory_relief.inc()
            freed = [self._make_room(workers) for workers in processes.full()]
            if not any(freed):  # to vacate a whole process ends more groups
                self._vacate(processes.vacatable())
        for shortage in processes.shortages():
            self._relieve_host(processes, shortage, now=now)

    def _relieve_host(self, processes: Processes, shortage: Shortage, *, now: float) -> None:
        if shortage.is_relieved or self._is_retiring(shortage.idle):
            return
        if self._retire_idle(shortage.idle, why="the memory of its host or cgroup is short"):
            self._metrics.memory_pressure.labels(action="group").inc()
            return
        if now - self._replaced_at.get(shortage.scope, float("-inf")) >= REPLACE_PAUSE:
            self._replaced_at = {scope: at for scope, at in self._replaced_at.items() if now - at < REPLACE_PAUSE}
            if processes.replace_one(shortage.scope):
                self._replaced_at[shortage.scope] = now
                self._metrics.memory_pressure.labels(action="process").inc()

    def _make_room(self, workers: Sequence[Assignment]) -> bool:
        """Retire one of these groups; whether one is ending now."""
        return self._is_retiring(workers) or self._retire_idle(workers, why="another group waits for a place")

    def _vacate(self, candidates: Sequence[Sequence[Assignment]]) -> None:
        """Retire all groups of the first process that only idle groups use, unless all groups of one end already."""
        if any(all(self._is_ending(worker.key) for worker in workers) for workers in candidates):
            return
        # Processes whose groups all have a low rank come first; with equal ranks the order of `candidates` stays.
        for workers in sorted(candidates, key=lambda workers: max(self._rank(worker.key) for worker in workers)):
            if all(self._is_idle(worker) and not self._stays(worker.key) for worker in workers):
                for worker in workers:
                    self._retire(worker.key, "another group waits for a process")
                return

    def _is_idle(self, worker: Assignment) -> bool:
        # A worker that loads has no requests yet: those in its queue wait for it.
        return self._clock.time() - worker.last_used >= HEAP_INTERVAL and self._at_rest(worker.key)

    def _stays(self, key: Key) -> bool:
        return self._tracker.is_pinned(key) or self._tracker.is_held(key)

    def _is_retiring(self, workers: Sequence[Assignment]) -> bool:
        return any(self._is_ending(worker.key) for worker in workers)

    def _is_ending(self, key: Key) -> bool:
        # A group without desired state: its queue was proven empty, and its worker is about to be stopped.
        return self._tracker.is_retired(key) or self._tracker.status(key) is None

    def _retire_idle(self, workers: Sequence[Assignment], *, why: str) -> bool:
        """Retire a group that was not used for a while: by rank, then in the order of `workers`. False if there is
        none, or one is ending already."""
        if self._is_retiring(workers):
            return False
        ranked = sorted(workers, key=lambda worker: self._rank(worker.key))
        return any(self._retire(worker.key, why) for worker in ranked if self._is_idle(worker))

    def _retire(self, key: Key, why: str) -> bool:
        # Also an unbound group: otherwise its workers would hold their memory until `stop_delay` is over.
        if not self._tracker.retire(key):
            return False
        self._log.info("group retired", key=key, why=why)
        return True
