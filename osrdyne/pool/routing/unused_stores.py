"""Has the queues of priorities that no route uses any more deleted, once they are empty (lifecycle:
several-queues-per-group; docs/ingress.md).

When routes change, or a managed pool becomes a direct one, the request queues loop takes such a queue from its
exchange, and workers go on serving it. This looks at listings until one from after the settle time shows that nobody
holds a request of it: then workers are told to let go, and the request queues loop proves it again and deletes it. What
turns out not to be empty is served again. Runs for a whole term; it declares, binds and deletes nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable

from osrdyne.aio.clock import Clock
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.errors import BrokerError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.ports import StoreTotals
from osrdyne.pool.state.observed import QueueBoard
from osrdyne.pool.workers.control import WorkerControl
from osrdyne.protocol.names import Key

LOOK_INTERVAL = 10.0
"""Seconds between two looks; without unused stores a look costs nothing."""


class UnusedStores:
    """The stores on their way out. `look_at`: have the request queues loop look at a group."""

    def __init__(
        self,
        *,
        layout: QueueLayout,
        board: QueueBoard,
        totals: StoreTotals,
        control: WorkerControl,
        look_at: Callable[[Key], None],
        settle_delay: float,
        clock: Clock,
    ) -> None:
        self._layout = layout
        self._board = board
        self._totals = totals
        self._control = control
        self._look_at = look_at
        self._settle_delay = settle_delay
        self._clock = clock
        self._count = 0
        self._log: Logger = get_logger("unused_stores")

    async def run(self) -> None:
        """Look again and again, for ever."""
        while True:
            await self._clock.sleep(LOOK_INTERVAL)
            try:
                await self.look()
            except BrokerError as error:
                self._log.warning("unused queues cannot be looked at", error=str(error))

    async def look(self) -> None:
        """One pass."""
        unused = self._layout.unused()
        if len(unused) != self._count:
            self._count = len(unused)
            self._log.info("serving queues that no route uses until they are empty", queues=self._count)
        for key, priority in unused:
            if priority not in self._board[key].disposable and self._layout.serve_again(key, priority):
                await self._tell(key)
        if any(self._settled_at(key) <= self._clock.monotonic() for key, _ in unused):
            await self._dispose_of_empty_ones()

    def _settled_at(self, key: Key) -> float:
        """From when on nothing can come into an unused store of the group; never while the group is not bound: its
        end takes all of its queues."""
        facts = self._board[key]
        return facts.bound_at + self._settle_delay if facts.is_bound and facts.bound_at is not None else float("inf")

    async def _dispose_of_empty_ones(self) -> None:
        totals = await self._totals.list_store_totals()
        for key, priority in self._layout.unused():  # may be others by now
            total, disposable = totals.get((key, priority)), self._board[key].disposable
            if total is None or total.messages or total.sampled_after < self._settled_at(key) or priority in disposable:
                continue
            self._layout.let_go(key, priority)
            self._board.update(key, disposable=(*disposable, priority))
            self._look_at(key)
            await self._tell(key)

    async def _tell(self, key: Key) -> None:
        await self._control.tell_queues(key, self._layout.served(key))
