"""Eviction: while groups wait for a place, idle groups are retired: by the rank of their profile, then by last use.

A retired group is unbound at once and ends like any other, when its queue is proven empty. A request that arrives
meanwhile keeps it, and another group is chosen. A group that waits is not idle, however long it waits: it is retired
when a listing shows that its requests are gone, because they have expired or were cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from osrdyne.aio.signals import Subscription, Wakeup
from osrdyne.broker.management.listings import ListedQueue
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.queues.depths import QueueDepths
from osrdyne.pool.state.groups.admission import Admission, Candidate, choose_to_end
from osrdyne.pool.state.groups.tracker import PoolStateTracker
from osrdyne.pool.state.groups.transitions import GroupRecord, GroupStatus
from osrdyne.pool.state.observed import WorkerStatuses
from osrdyne.pool.state.workers.worker_reports import WorkerRegistry, WorkerState
from osrdyne.protocol.names import Key

POLL_INTERVAL = 5.0  # Seconds between two passes while groups wait.
AT_REST = frozenset({WorkerState.READY, WorkerState.IDLE})


class GroupEviction:
    """Chooses the groups to retire, in one term."""

    def __init__(
        self,
        context: TermContext,
        *,
        tracker: PoolStateTracker,
        admission: Admission,
        worker_status: WorkerStatuses,
        worker_reports: WorkerRegistry,
        depths: QueueDepths,
        rank: Callable[[Key], int],
    ) -> None:
        """`rank`: groups of the lowest rank are evicted first."""
        self._tracker = tracker
        self._admission = admission
        self._worker_status = worker_status
        self._worker_reports = worker_reports
        self._depths = depths
        self._rank = rank
        self._idle_for = context.settings.lifecycle.make_room_after
        self._clock = context.clock
        self._seen_busy: dict[Key, float] = {}
        self._wakeup = Wakeup(context.clock)
        admission.on_waiting = self._wakeup.set
        context.metrics.groups_waiting.set_function(lambda: len(admission.waiting()))
        context.metrics.distinct_keys.set_function(lambda: len(admission.key_counter))
        self._log: Logger = get_logger("eviction")

    async def run(self) -> None:
        """Evict whenever a group begins to wait, and at intervals while any does. Runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._wake_on(self._depths.feed.subscribe()), name="queue depths for eviction")
            await self._evict_while_groups_wait()

    async def _wake_on(self, totals: Subscription[Key]) -> None:
        while True:
            await totals.wait()
            if self._admission.waiting():
                self._wakeup.set()

    async def _evict_while_groups_wait(self) -> None:
        while True:
            await self._wakeup.wait(POLL_INTERVAL if self._admission.waiting() else None)
            self.evict()

    def take_listing(self, listing: Sequence[ListedQueue]) -> None:
        """Retire the waiting groups without a request."""
        for queue in listing:
            record = self._tracker.record(queue.key)
            if record is None or queue.messages != 0 or not queue.whole or not self._admission.is_waiting(queue.key):
                continue
            # An older sample may be from before the request for which the group waits.
            if record.status is GroupStatus.ACTIVE and record.last_activity < queue.sampled_after:
                self._tracker.retire(queue.key)

    def evict(self) -> None:
        """Evict once."""
        waiting = len(self._admission.waiting())
        if not waiting:
            self._seen_busy.clear()  # of groups that may have ended since
            return
        candidates = [
            self._candidate(key, record)
            for key in self._admission.admitted()
            if (record := self._tracker.record(key)) is not None
        ]
        for key in choose_to_end(candidates, waiting=waiting, now=self._clock.monotonic(), idle_for=self._idle_for):
            if self._tracker.retire(key):
                self._log.info("group evicted", key=key, waiting=waiting)

    def _candidate(self, key: Key, record: GroupRecord) -> Candidate:
        stays = self._tracker.is_pinned(key) or self._tracker.is_held(key)
        self._check_queue(key, record)
        return Candidate(key, record, busy=not self.is_at_rest(key), stays=stays, rank=self._rank(key))

    def _check_queue(self, key: Key, record: GroupRecord) -> None:
        """Check the queue of a group that could be evicted if its workers were not busy. Workers that do not report
        completion stay busy after their first request: only the queue shows when they are idle."""
        busy = [worker for worker in self._worker_reports.of_key(key) if worker.state is WorkerState.BUSY]
        if not busy or any(worker.reports_completion for worker in busy) or record.status is not GroupStatus.ACTIVE:
            return
        if self._clock.monotonic() - record.last_activity < self._idle_for:
            return
        after = max(worker.heard_at for worker in busy)
        messages = self._depths.messages(key, after=max(after, self._seen_busy.get(key, after)))
        if messages == 0:
            self._worker_reports.note_empty_queue(key, sampled_after=after)
        elif messages:
            # Ask for a newer sample next time: this one has proven that the group is busy.
            self._seen_busy[key] = self._clock.monotonic()

    def is_at_rest(self, key: Key) -> bool:
        """Whether every worker of the group reports that it is idle; a group without workers is idle, too."""
        observed = self._worker_status[key]
        if observed.stopping or observed.starting:
            return False
        reports = [self._worker_reports[instance.worker_id] for instance in observed.instances]
        return all(report is not None and report.state in AT_REST and not report.in_flight for report in reports)
