"""Priority levels of the groups of a managed pool: which queues a group has, and when one of them is deleted.

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
from osrdyne.pool.state.workers.worker_reports import WorkerRegistry, WorkerReportState, WorkerState
from osrdyne.pool.workers.control import WorkerControl
from osrdyne.protocol.names import Key, QueueName

POLL_INTERVAL = 10.0  # Seconds between two passes that send workers their queues.
# Seconds until the same list of queues is sent again, because a control message may get lost.
SEND_AGAIN_AFTER = 60.0
NEEDED_FOR = 60.0  # Seconds for which a level that no route uses is kept after a request of it came back.
SILENT_FOR = 60.0  # Seconds that a serving worker may go without reporting what it runs before a warning is logged.


@dataclass(frozen=True, slots=True)
class _Sent:
    """The latest list of queues sent to a worker, and when (monotonic)."""

    queues: list[QueueName]
    at: float


class PriorityLevels:
    """The priority levels in use."""

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
        # Workers that have never reported what they run although their group has several queues, with their keys. Such
        # a worker may consume only the queue that it was started with; requests with a priority then wait and expire.
        self.silent: Mapping[str, Key] = {}
        self._changed = Wakeup(context.clock)
        self._log: Logger = get_logger("priorities")

    @property
    def of_routes(self) -> frozenset[int]:
        """The priorities that some route uses."""
        return self._of_routes

    def use(self, priorities: Iterable[int]) -> None:
        """Give every group a queue for each of these levels; their exchanges exist. Requests that wait until a group
        is bound also wait for the new queues."""
        self._of_routes = frozenset(priorities)
        self._apply()

    def require(self, priority: int | None) -> None:
        """Keep a level in use because a request of it came back, though perhaps no route uses it any more."""
        if priority is None or priority in self._of_routes:
            return
        # Noted at each such request: the level stays for as long as some come back.
        self._needed_again[priority] = self._clock.monotonic()
        if priority not in self._layout.used:
            self._log.info("priority level required again by returned requests", priority=priority)
            self._apply()

    def _apply(self) -> None:
        # Levels of returning requests stay for a while, although no route uses them any more.
        used = self._of_routes.union(self._needed_again)
        if used == self._layout.used:
            return
        # Before `bind_again`: the actors declare and bind what the layout says when they run.
        self._layout.use(used)
        # Requests of all keys wait from here until their group is bound again with the new levels.
        self._queue_loop.bind_again(self._queue_status.existing())
        self._changed.set()

    def _drop_unneeded_levels(self) -> None:
        before = self._clock.monotonic() - NEEDED_FOR
        self._needed_again = {priority: at for priority, at in self._needed_again.items() if at > before}
        self._apply()

    async def run(self) -> None:
        """Send workers the queues of their group: to new workers, after a change, and at intervals. Runs until
        cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send_on_change(), name="send queues to reporting workers")
            while True:
                self._drop_unneeded_levels()
                workers = self._worker_reports.all()
                self._sent = {
                    one.worker_id: self._sent[one.worker_id] for one in workers if one.worker_id in self._sent
                }
                for key in {worker.key for worker in workers}:
                    await self._send(key)
                self._find_silent(workers)
                await self._changed.wait(POLL_INTERVAL)

    def _find_silent(self, workers: Iterable[WorkerReportState]) -> None:
        """Warn once of each worker that has had its queues for a while and implements only the minimal protocol."""
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
                "worker may not consume the priority queues of its group",
                key=silent[worker_id],
                worker_id=worker_id,
                remedy="Use the worker runtime of osrdyne, or routes without a priority.",
            )
        self.silent = silent

    async def _send_on_change(self) -> None:
        changes = self._worker_reports.feed.subscribe()
        while True:
            for key in await changes.wait():
                for worker in self._worker_reports.of_key(key):
                    if worker.state is WorkerState.LOADING:  # perhaps a new process that was started with an old name
                        self._sent.pop(worker.worker_id, None)
                await self._send(key)

    async def _send(self, key: Key) -> None:
        """Send the workers of a group their queues, if one of them does not have the current list or got it long
        ago."""
        if not (self._layout.managed or self._layout.has_levels(key)):
            return
        workers = [worker.worker_id for worker in self._worker_reports.of_key(key)]
        queues, now = self._layout.served(key), self._clock.monotonic()
        if all(self._has(worker, queues, now) for worker in workers):
            return
        # Noted only if RabbitMQ took the message; it may still get lost on the way, so that it is repeated at
        # intervals.
        if await self._control.send_queues(key, queues):
            self._sent |= {worker: _Sent(queues, now) for worker in workers}

    def _has(self, worker: str, queues: list[QueueName], now: float) -> bool:
        sent = self._sent.get(worker)
        return sent is not None and sent.queues == queues and now - sent.at < SEND_AGAIN_AFTER


class UnusedLevels:
    """Deletes the queues of levels that no route uses any more."""

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
        """Check at intervals. Runs until cancelled."""
        while True:
            await self._clock.sleep(POLL_INTERVAL)
            try:
                await self.reconcile()
            except BrokerError as error:
                self._log.warning("unused priority queues not checked", error=str(error))

    async def reconcile(self) -> None:
        """Check the unused levels once."""
        unused = self._layout.unused()
        if len(unused) != self._count:
            self._count = len(unused)
            self._log.info("serving unused priority queues until they are empty", queues=self._count)
        for key, priority in unused:
            # Its deletion was given up because it was not empty: unless workers consume it again, its requests expire.
            if priority not in self._queue_status[key].disposable and self._layout.serve_again(key, priority):
                await self._send(key)
        # A listing only when one could prove something: it costs RabbitMQ a pass over all queues.
        if any(self._settled_at(key) <= self._clock.monotonic() for key, _ in unused):
            await self._dispose_of_empty_ones()

    def _settled_at(self, key: Key) -> float:
        """Since when nothing can arrive in an unused queue of the group; never while the group is not bound, because
        its end deletes all of its queues."""
        observed = self._queue_status[key]
        return (
            observed.bound_at + self._settle_delay
            if observed.is_bound and observed.bound_at is not None
            else float("inf")
        )

    async def _dispose_of_empty_ones(self) -> None:
        totals = await self._listings.list_level_totals()
        for key, priority in self._layout.unused():  # the levels may have changed meanwhile
            total, disposable = totals.get((key, priority)), self._queue_status[key].disposable
            if total is None or total.messages or total.sampled_after < self._settled_at(key) or priority in disposable:
                continue
            # First the workers stop consuming, then the queue is proven empty (lifecycle: several-queues-per-group).
            self._layout.stop_serving(key, priority)
            self._queue_loop.dispose(key, priority)
            await self._send(key)

    async def _send(self, key: Key) -> None:
        await self._control.send_queues(key, self._layout.served(key))
