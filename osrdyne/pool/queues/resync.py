"""The resync: compares groups with a listing of RabbitMQ at intervals, for changes without an event (lifecycle:
"Takeover and restart").

The same listing seeds a term: a queue that is bound or holds requests is ACTIVE, any other UNBOUND. Later listings
adopt unknown queues in the same way, and detect queues and bindings that another client removed. A listing is ignored
for keys with a command in progress since it began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from osrdyne.broker.management.listings import ListedQueue
from osrdyne.errors import BrokerError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import QueueCommands, QueueListings
from osrdyne.pool.queues.loop import RequestQueuesLoop
from osrdyne.pool.state.groups.tracker import PoolStateTracker
from osrdyne.pool.state.groups.transitions import GroupStatus
from osrdyne.pool.state.observed import QueueStatuses, WorkerStatuses
from osrdyne.protocol.names import Key


def seed_status(queue: ListedQueue) -> GroupStatus:
    """The desired state of a group that was found in RabbitMQ (lifecycle: listed-bindings-are-unknown)."""
    return GroupStatus.ACTIVE if queue.bound or queue.ready > 0 else GroupStatus.UNBOUND


class Resync:
    """Seeds a term and compares it with RabbitMQ while it lasts."""

    def __init__(
        self,
        context: TermContext,
        *,
        tracker: PoolStateTracker,
        queue_status: QueueStatuses,
        queue_loop: RequestQueuesLoop,
        queue_commands: QueueCommands,
        listings: QueueListings,
        on_listing: Sequence[Callable[[Sequence[ListedQueue]], None]],
    ) -> None:
        self._tracker = tracker
        self._queue_status = queue_status
        self._queue_loop = queue_loop
        self._queue_commands = queue_commands
        self._listings = listings
        self._on_listing = on_listing
        self._interval = context.settings.lifecycle.resync_interval
        self._clock = context.clock
        self._changed = queue_status.feed.subscribe()
        self._found_empty: set[Key] = set()
        self._log: Logger = get_logger("resync")

    async def seed(self) -> int:
        """Take over every queue of the pool. Returns their number."""
        # With the token held: an earlier listing could miss a queue or a binding (lifecycle: token-before-listing).
        listed = await self._listings.list_request_queues()
        for queue in listed:
            self._queue_commands.adopt(queue.key, queue.ready_by_level)
            # Its binding is unknown until a command of this term proves it (lifecycle: listed-bindings-are-unknown).
            self._queue_loop.adopt(queue.key)
            if not queue.bound:
                # Declared shortly before its node was killed, it may never get a Raft leader (decision 0020).
                self._queue_commands.suspect(queue.key)
            # All clocks start now: how long the group was idle under the earlier leader is not known.
            self._tracker.adopt(queue.key, seed_status(queue))
            if queue.messages == 0:
                self._found_empty.add(queue.key)
        return len(listed)

    def retire_unused(self, worker_status: WorkerStatuses) -> None:
        """Retire groups that were found without request, binding or worker, so that they end as soon as that is proven.

        Otherwise a worker would be started for them and stopped after `stop_delay`, when it has just loaded its data.
        """
        for key in self._found_empty:
            # One that was required meanwhile is active, and stays.
            if self._tracker.status(key) is GroupStatus.UNBOUND and not worker_status[key].instances:
                self._tracker.retire(key)
        self._found_empty.clear()

    async def run(self) -> None:
        """Compare at intervals. Runs until cancelled."""
        while True:
            # The seed has just listed everything.
            await self._clock.sleep(self._interval)
            try:
                await self.compare()
            except BrokerError as error:
                self._log.warning("resync failed", error=str(error))

    def _adopt(self, queue: ListedQueue) -> None:
        """Take over an unknown queue, for example one that a deposed leader declared late. Without binding and
        message it is retired, and no worker is started for it."""
        self._queue_loop.adopt(queue.key)
        if seed_status(queue) is GroupStatus.ACTIVE:
            self._tracker.require_worker_group(queue.key)
            return
        # Unbound and unknown: its node may have been killed before the queue was persisted (decision 0020).
        self._queue_commands.suspect(queue.key)
        self._tracker.adopt(queue.key, GroupStatus.UNBOUND)
        if queue.messages == 0:
            self._tracker.retire(queue.key)

    async def compare(self) -> None:
        """Compare once."""
        known = self._queue_status.existing()
        bound = {key for key in known if self._queue_status[key].is_bound}
        # Taken before and after the listing: a command that ran meanwhile makes it old for that key.
        busy = self._queue_loop.busy_keys()
        self._changed.take()  # from here on, changes are newer than the listing
        listing = await self._listings.list_request_queues()
        # One listing for all that need one: each costs RabbitMQ a pass over its queues.
        for take in self._on_listing:
            take(listing)
        listed = {queue.key: queue for queue in listing}
        busy |= self._queue_loop.busy_keys().union(self._changed.take())
        # A listing may still show a queue whose deletion is in progress: keys with a command are left out.
        for key in listed.keys() - busy:
            self._queue_commands.adopt(key, listed[key].ready_by_level)
        for key in listed.keys() - known - busy:
            self._log.warning("unknown request queue adopted", key=key)
            self._adopt(listed[key])
        # A listing may be incomplete, and workers are stopped for what it lacks: RabbitMQ is asked for each key.
        for key in bound - busy:
            if key not in listed or not listed[key].bound:
                self._queue_loop.verify(key, since=self._clock.monotonic())
        for key in (known - bound - busy) & listed.keys():
            if not listed[key].whole and key not in self._queue_loop.busy_keys():
                # A missing queue of the group would keep the others from being deleted: `check` records it.
                await self._queue_commands.check(key)
        for key in known - bound - listed.keys() - busy:
            # A listing proves no absence: it may be incomplete while a node is away.
            if await self._queue_commands.exists(key) or key in self._queue_loop.busy_keys():
                continue
            self._log.warning("request queue was deleted by another client", key=key)
            # Asked twice, by listing and by declare, and no command since: the observed state may change.
            self._queue_loop.note_missing(key)
