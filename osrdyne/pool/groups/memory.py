"""Memory of pooled processes: while the heap of a process is too full, its least recently used idle group is retired.

One group of a process at a time, because its memory is free only after its worker has ended and the JVM has collected.
A retired group is unbound and proven empty as any other; its next request starts it again, elsewhere if need be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.state.groups import GroupStatus
from osrdyne.pool.state.tracker import PoolStateTracker
from osrdyne.protocol.names import Key
from osrdyne.protocol.pooled import Assignment

INTERVAL = 15.0
"""Seconds between two looks. A worker that was used since the look before it stays."""


class MemoryRelief:
    """Retires groups, in one term. `crowded` returns, for each process with a full heap, its idle workers, the least
    recently used first."""

    def __init__(
        self,
        context: TermContext,
        *,
        tracker: PoolStateTracker,
        crowded: Callable[[], Sequence[Sequence[Assignment]]],
    ) -> None:
        self._tracker = tracker
        self._crowded = crowded
        self._clock = context.clock
        self._metrics = context.metrics
        self._log: Logger = get_logger("memory_relief")

    async def run(self) -> None:
        """Look at intervals. Runs until cancelled."""
        while True:
            await self._clock.sleep(INTERVAL)
            self.relieve()

    def relieve(self) -> None:
        """Retire one group of each process whose heap is full, unless one of them is ending already."""
        for workers in self._crowded():
            keys = [worker.key for worker in workers]
            if not any(self._tracker.is_retired(key) for key in keys):
                idle = [worker.key for worker in workers if self._clock.time() - worker.last_used >= INTERVAL]
                self._retire_first(idle)

    def _retire_first(self, keys: Sequence[Key]) -> None:
        for key in keys:
            if self._tracker.status(key) is GroupStatus.ACTIVE and self._tracker.retire(key):
                self._metrics.memory_relief.inc()
                self._log.info("group retired: the heap of its process is full", key=key)
                return
