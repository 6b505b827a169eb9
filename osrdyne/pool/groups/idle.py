"""The idle reaper: ends UNBOUND groups whose `stop_delay` is over, on evidence and not on the clock alone.

Before the workers of a group are stopped, a listing must show that its queue is empty, unacknowledged deliveries
included. A lost activity report therefore costs one cycle at most, and a busy worker is never stopped (lifecycle:
idle-needs-a-fresh-total).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from osrdyne.aio.signals import Subscription
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.queues.depths import QueueDepths
from osrdyne.pool.queues.plan import stop_evidence_after
from osrdyne.pool.state.groups.tracker import PoolStateTracker
from osrdyne.pool.state.observed import QueueStatuses, WorkerStatuses
from osrdyne.protocol.names import Key

POLL_INTERVAL = 10.0  # Seconds between passes over due groups whose queue has not answered.


class IdleReaper:
    """Decides which due groups end."""

    def __init__(
        self,
        context: TermContext,
        *,
        tracker: PoolStateTracker,
        queue_status: QueueStatuses,
        worker_status: WorkerStatuses,
        depths: QueueDepths,
        is_removed: Callable[[Key], bool] = lambda key: False,
    ) -> None:
        """`is_removed`: whether the queue of a key is being removed, so that what waits in it is answered `gone`."""
        self._tracker = tracker
        self._is_removed = is_removed
        self._queue_status = queue_status
        self._worker_status = worker_status
        self._depths = depths
        self._settle_delay = context.settings.lifecycle.settle_delay
        self._clock = context.clock
        self._seen_busy: dict[Key, float] = {}
        self._interval = min(POLL_INTERVAL, max(1.0, self._settle_delay))
        self._log: Logger = get_logger("idle_reaper")

    async def run(self) -> None:
        """Examine the groups that become due. Runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._wake_on(self._depths.feed.subscribe()), name="queue depths for the idle reaper")
            while True:
                due = bool(self._tracker.stop_due_keys())
                await self._tracker.stop_due.wait(self._interval if due else None)
                self.reap()

    async def _wake_on(self, totals: Subscription[Key]) -> None:
        while True:
            await totals.wait()
            self._tracker.stop_due.set()

    def reap(self) -> None:
        """Examine the due groups once."""
        due = self._tracker.stop_due_keys()
        self._seen_busy = {key: at for key, at in self._seen_busy.items() if key in due}
        for key in due:
            if not self._queue_status[key].exists:
                self._tracker.end(key)  # no queue, so nothing can be lost
                continue
            messages = self._messages(key)  # None: not known yet, the next pass asks again
            # The tracker refuses if the group was required or held meanwhile (lifecycle: pin-until-forwarded).
            if messages == 0 and self._tracker.end(key):
                self._log.info("group ends", key=key)
            elif messages and self._tracker.is_retired(key) and self._is_answered(key):
                # Its workers finish the requests, or they are answered; then the total is requested again.
                self._seen_busy[key] = self._clock.monotonic()
            elif messages:
                # Activity reports were lost, or a request arrived just before the unbind: serve it.
                self._tracker.require_worker_group(key)
                self._log.info("group is not idle", key=key, messages=messages)

    def _is_answered(self, key: Key) -> bool:
        return bool(self._worker_status[key].instances) or self._is_removed(key)

    def _messages(self, key: Key) -> int | None:
        after = stop_evidence_after(self._queue_status[key], settle_delay=self._settle_delay)
        # The unbind of this term is not confirmed: no sample proves anything yet.
        if after is None:
            return None
        return self._depths.messages(key, after=max(after, self._seen_busy.get(key, after)))
