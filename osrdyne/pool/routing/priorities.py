"""Priority levels of the groups of a managed pool: which queues a group has, and when one of them goes.

`PriorityLevels` selects the levels in use, has the request queues loop reconcile every group, and sends workers the
list of their queues. `UnusedLevels` removes the queue of a level that no route uses any more (lifecycle:
several-queues-per-group; docs/reference/routes/priorities.md): the request queues loop unbinds it and workers go on
serving it until a listing from after the settle time shows that it is empty. Then workers are asked to stop consuming
it, and the request queues loop proves again that it is empty before it deletes it. In a direct pool, only groups that
still have such queues from an earlier managed pool are handled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from osrdyne.aio.signals import Wakeup
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.errors import BrokerError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import QueueListings
from osrdyne.pool.queues.loop import RequestQueuesLoop
from osrdyne.pool.state.observed import QueueStatuses
from osrdyne.pool.state.worker_reports import WorkerRegistry, WorkerReportState, WorkerState
from osrdyne.pool.workers.control import WorkerControl
from osrdyne.protocol.names import Key, QueueName

POLL_INTERVAL = 10.0
"""How often it is looked who has to be told, seconds."""
TELL_AGAIN_AFTER = 60.0
"""Seconds until a worker is told the same again: a control message may get lost."""
NEEDED_FOR = 60.0
"""How long a class is kept that no route uses and that requests came back for, seconds."""
SILENT_FOR = 60.0
"""How long a worker that serves may go without a report of what it runs before it is warned about, seconds."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """What a worker was told last, and when (monotonic)."""

    queues: list[QueueName]
    at: float


class PriorityLevels:
    """The classes in use."""

    def __init__(
        self,
        context: TermContext,
        *,
        layout: QueueLayout,
        queue_status: QueueStatuses,
        worker_reports: WorkerRegistry,
        queue_loop: RequestQueuesLoop,
        control: WorkerControl,
    ) -> None:
        self._layout = layout
        self._queue_status = queue_status
        self._worker_reports = worker_reports
        self._queue_loop = queue_loop
        self._control = control
        self._clock = context.clock
        self._of_routes: frozenset[int] = frozenset()
        self._needed_again: dict[int, float] = {}
        self._sent: dict[str, _Sent] = {}
        self._silent_since: dict[str, float] = {}
        self.silent: Mapping[str, Key] = {}
        """Workers that have never reported what they run although their group has several queues, with their keys. Such
        a worker may consume only the queue that it was started with; requests with a priority then wait and expire."""
        self._changed = Wakeup(context.clock)
        self._log: Logger = get_logger("priorities")

    @property
    def of_routes(self) -> frozenset[int]:
        """The priorities that some route uses."""
        return self._of_routes

    def use(self, priorities: Iterable[int]) -> None:
        """From now on every group has a queue for each of these; their exchanges exist. Whoever waits until a group is
        bound waits until it has them."""
        self._of_routes = frozenset(priorities)
        self._apply()

    def require(self, priority: int | None) -> None:
        """A request of this class is under way, which perhaps no route uses any more."""
        if priority is None or priority in self._of_routes:
            return
        self._needed_again[priority] = self._clock.monotonic()
        if priority not in self._layout.used:
            self._log.info("a class is needed again, requests of it have come back", priority=priority)
            self._apply()

    def _apply(self) -> None:
        used = self._of_routes.union(self._needed_again)
        if used == self._layout.used:
            return
        self._layout.use(used)
        self._queue_loop.bind_again(self._queue_status.existing())
        self._changed.set()

    def _forget_what_is_not_needed(self) -> None:
        before = self._clock.monotonic() - NEEDED_FOR
        self._needed_again = {priority: at for priority, at in self._needed_again.items() if at > before}
        self._apply()

    async def run(self) -> None:
        """Tell workers the queues of their group: new ones, all when that changes, and again at times, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tell_who_changes(), name="queues for workers that report")
            while True:
                self._forget_what_is_not_needed()
                workers = self._worker_reports.all()
                self._sent = {
                    one.worker_id: self._sent[one.worker_id] for one in workers if one.worker_id in self._sent
                }
                for key in {worker.key for worker in workers}:
                    await self._tell(key)
                self._find_silent(workers)
                await self._changed.wait(POLL_INTERVAL)

    def _find_silent(self, workers: Iterable[WorkerReportState]) -> None:
        """Warn once of each worker that has had its queues for a while and speaks only the minimal protocol."""
        now = self._clock.monotonic()
        suspected = {
            worker.worker_id: worker.key
            for worker in workers
            if worker.state.serves and not worker.counts_requests and len(self._layout.served(worker.key)) > 1
        }
        self._silent_since = {worker_id: self._silent_since.get(worker_id, now) for worker_id in suspected}
        silent = {one: key for one, key in suspected.items() if now - self._silent_since[one] >= SILENT_FOR}
        for worker_id in silent.keys() - self.silent.keys():
            self._log.warning(
                "worker does not report for the priorities of its group: it may not consume their queues",
                key=silent[worker_id],
                worker_id=worker_id,
                remedy="Use the worker runtime of osrdyne, or routes without a priority.",
            )
        self.silent = silent

    async def _tell_who_changes(self) -> None:
        changes = self._worker_reports.feed.subscribe()
        while True:
            for key in await changes.wait():
                for worker in self._worker_reports.of_key(key):
                    if worker.state is WorkerState.LOADING:  # perhaps a process that was started anew with an old name
                        self._sent.pop(worker.worker_id, None)
                await self._tell(key)

    async def _tell(self, key: Key) -> None:
        """Tell the workers of a group, if one of them does not know, or was told long ago."""
        if not (self._layout.managed or self._layout.has_levels(key)):
            return
        workers = [worker.worker_id for worker in self._worker_reports.of_key(key)]
        queues, now = self._layout.served(key), self._clock.monotonic()
        if all(self._knows(worker, queues, now) for worker in workers):
            return
        if await self._control.send_queues(key, queues):
            self._sent |= {worker: _Sent(queues, now) for worker in workers}

    def _knows(self, worker: str, queues: list[QueueName], now: float) -> bool:
        told = self._sent.get(worker)
        return told is not None and told.queues == queues and now - told.at < TELL_AGAIN_AFTER


class UnusedLevels:
    """The stores on their way out. `reconcile`: have the request queues loop look at a group."""

    def __init__(
        self,
        context: TermContext,
        *,
        layout: QueueLayout,
        queue_status: QueueStatuses,
        listings: QueueListings,
        queue_loop: RequestQueuesLoop,
        control: WorkerControl,
    ) -> None:
        self._layout = layout
        self._queue_status = queue_status
        self._listings = listings
        self._queue_loop = queue_loop
        self._control = control
        self._settle_delay = context.settings.lifecycle.settle_delay
        self._clock = context.clock
        self._count = 0
        self._log: Logger = get_logger("priorities")

    async def run(self) -> None:
        """Look again and again, for ever."""
        while True:
            await self._clock.sleep(POLL_INTERVAL)
            try:
                await self.reconcile()
            except BrokerError as error:
                self._log.warning("unused queues cannot be looked at", error=str(error))

    async def reconcile(self) -> None:
        """One pass."""
        unused = self._layout.unused()
        if len(unused) != self._count:
            self._count = len(unused)
            self._log.info("serving queues that no route uses until they are empty", queues=self._count)
        for key, priority in unused:
            if priority not in self._queue_status[key].disposable and self._layout.serve_again(key, priority):
                await self._tell(key)
        if any(self._settled_at(key) <= self._clock.monotonic() for key, _ in unused):
            await self._dispose_of_empty_ones()

    def _settled_at(self, key: Key) -> float:
        """From when on nothing can come into an unused store of the group; never while the group is not bound: its
        end takes all of its queues."""
        facts = self._queue_status[key]
        return facts.bound_at + self._settle_delay if facts.is_bound and facts.bound_at is not None else float("inf")

    async def _dispose_of_empty_ones(self) -> None:
        totals = await self._listings.list_level_totals()
        for key, priority in self._layout.unused():  # may be others by now
            total, disposable = totals.get((key, priority)), self._queue_status[key].disposable
            if total is None or total.messages or total.sampled_after < self._settled_at(key) or priority in disposable:
                continue
            self._layout.let_go(key, priority)
            self._queue_loop.dispose(key, priority)
            await self._tell(key)

    async def _tell(self, key: Key) -> None:
        await self._control.send_queues(key, self._layout.served(key))
