"""Oversight of the whole pool: the loops that look at everything again and again, and find what no event told.

Who makes room, which groups end, which queues nobody needs, which workers hang, and what somebody else has done to the
broker. Put together here for the term, which runs them; each decides for itself, in a module of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from osrdyne.aio.clock import Clock
from osrdyne.aio.supervise import start_endless
from osrdyne.broker.management.listings import ListedQueue, RequestQueueListing
from osrdyne.broker.queues.request_queues import RequestQueueCommands
from osrdyne.config.models import Settings
from osrdyne.metrics import Metrics
from osrdyne.pool.groups.eviction import RoomMaker
from osrdyne.pool.groups.idle import IdleJudge
from osrdyne.pool.queues.depths import FreshTotals
from osrdyne.pool.queues.loop import RequestQueuesLoop
from osrdyne.pool.queues.resync import Resync
from osrdyne.pool.routing.priorities import UnusedStores
from osrdyne.pool.state.admission import Admission
from osrdyne.pool.state.instances import InstanceBook
from osrdyne.pool.state.observed import QueueBoard, WorkerBoard
from osrdyne.pool.state.tracker import PoolStateTracker
from osrdyne.pool.state.worker_reports import WorkerRegistry
from osrdyne.pool.workers.control import WorkerControl
from osrdyne.pool.workers.liveness import WorkerWatch
from osrdyne.pool.workers.loop import WorkerGroupsLoop


class Oversight:
    """The slow loops of one term."""

    def __init__(
        self,
        settings: Settings,
        *,
        tracker: PoolStateTracker,
        admission: Admission,
        queue_board: QueueBoard,
        worker_board: WorkerBoard,
        registry: WorkerRegistry,
        book: InstanceBook,
        listing: RequestQueueListing,
        totals: FreshTotals,
        commands: RequestQueueCommands,
        control: WorkerControl,
        queues_loop: RequestQueuesLoop,
        groups_loop: WorkerGroupsLoop,
        unused_stores: UnusedStores,
        on_listing: Callable[[Sequence[ListedQueue]], None],
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        lifecycle = settings.lifecycle
        self._worker_board = worker_board
        self._registry = registry
        self._unused_stores = unused_stores
        self._room_maker = RoomMaker(
            tracker=tracker,
            admission=admission,
            board=worker_board,
            registry=registry,
            totals=totals,
            idle_for=lifecycle.make_room_after,
            clock=clock,
            metrics=metrics,
        )
        self._judge = IdleJudge(
            tracker=tracker,
            board=queue_board,
            workers=worker_board,
            totals=totals,
            settle_delay=lifecycle.settle_delay,
            clock=clock,
        )
        self._watch = WorkerWatch(
            tracker=tracker,
            registry=registry,
            book=book,
            ask=control.ask_for_reports,
            replace=groups_loop.replace_hanging,
            patience=settings.worker.silence_timeout,
            clock=clock,
        )
        self.resync = Resync(
            tracker=tracker,
            board=queue_board,
            queues=queues_loop,
            listing=listing,
            commands=commands,
            on_listing=(self._watch.take_listing, on_listing, self._note_empty_queues),
            interval=lifecycle.resync_interval,
            clock=clock,
        )

    def _note_empty_queues(self, listed: Sequence[ListedQueue]) -> None:
        for queue in listed:
            if queue.messages == 0 and queue.whole:
                self._registry.note_empty_queue(queue.key, sampled_after=queue.sampled_after)

    def retire_unused(self) -> None:
        """After the first listing of workers: end groups that were found without anything, once that is proven."""
        self.resync.retire_unused(self._worker_board)

    def start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Run all of them in `group`."""
        return [
            start_endless(group, "idle judge", self._judge.run()),
            start_endless(group, "room maker", self._room_maker.run()),
            start_endless(group, "unused stores", self._unused_stores.run()),
            start_endless(group, "resync", self.resync.run()),
            start_endless(group, "worker watch", self._watch.run()),
        ]
