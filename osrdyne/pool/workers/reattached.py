"""Workers that get nothing although they consume their queue: RabbitMQ before 4.0 has attached them to a queue that
another client deleted and declared again, and drops what it delivers to them (broker: reattached-consumers).

Such requests count as unacknowledged, and no worker reports that it runs them. Those workers of the group that have run
nothing for a while are asked to connect anew, which returns the requests to the queue: such a worker has nothing to
lose, also if another one works. So are the workers of a queue that lost its binding. Not used with later versions of
RabbitMQ. Loses no request: nothing is acknowledged here.
"""

from __future__ import annotations

import asyncio

from osrdyne.aio.signals import ChangeFeed, Subscription
from osrdyne.errors import BrokerError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import QueueListings
from osrdyne.pool.state.workers.worker_reports import WorkerRegistry, WorkerReportState
from osrdyne.pool.workers.control import WorkerControl
from osrdyne.pool.workers.liveness import is_expected_to_work
from osrdyne.protocol.names import Key, WorkerId, may_be_addressed

INTERVAL = 2.0  # Seconds between two listings.
LISTING_SHARE = 9  # With many queues, RabbitMQ spends at most a tenth of its time on these listings.
SAMPLE_AGE = 6.0  # Seconds without work, longer than RabbitMQ keeps a total: what a worker has done since is not in it.
REPORT_TIME = 2.0  # Seconds in which a worker has reported a request that RabbitMQ has just delivered to it.


class ReattachedWorkers:
    """Asks workers that get no requests any more to connect anew."""

    def __init__(
        self,
        context: TermContext,
        *,
        listings: QueueListings,
        worker_reports: WorkerRegistry,
        control: WorkerControl,
        found_unbound: ChangeFeed[Key],
    ) -> None:
        """`found_unbound`: the groups whose queue another client may have declared again."""
        self._listings = listings
        self._worker_reports = worker_reports
        self._control = control
        self._found_unbound = found_unbound
        self._clock = context.clock
        # Idle workers of groups with messages that no worker runs: since when, and whether they were asked.
        self._since: dict[str, float] = {}
        self._asked: set[str] = set()
        self._log: Logger = get_logger("reattached_workers")

    async def run(self) -> None:
        """Check at intervals. Runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_unbound(self._found_unbound.subscribe()), name="queues without a binding")
            pause = INTERVAL
            while True:
                await self._clock.sleep(pause)
                began = self._clock.monotonic()
                try:
                    await self.check()
                except BrokerError as error:
                    self._log.warning("queue listing failed", error=str(error))
                pause = max(INTERVAL, LISTING_SHARE * (self._clock.monotonic() - began))

    async def _follow_unbound(self, unbound: Subscription[Key]) -> None:
        while True:
            for key in await unbound.wait():
                await self._ask(key)

    async def check(self) -> None:
        """Check the groups of idle workers once."""
        now = self._clock.monotonic()
        idle = {worker.worker_id: worker.key for worker in self._worker_reports.all() if self._is_idle(worker, now)}
        # Without a listing if none is idle.
        backlogs = await self._listings.list_backlogs() if idle else {}
        unreported = {key for key, one in backlogs.items() if (one.unacknowledged or 0) > self._running(key)}
        lacking = {name for name, key in idle.items() if key in unreported}
        self._since = {name: self._since.get(name, now) for name in lacking}
        # Once: the messages may be with a consumer that is not a worker of this pool. Liveness handles what remains.
        self._asked &= lacking
        for name in sorted(lacking - self._asked):
            key = idle[name]
            are_idle = all(worker.worker_id in idle for worker in self._expected(key))
            if now - self._since[name] >= (REPORT_TIME if are_idle else SAMPLE_AGE):
                self._asked.add(name)
                await self._control.ask_worker_to_reconnect(WorkerId(name))
                self._log.info("worker asked to reconnect", key=key, worker_id=name)

    def _is_idle(self, worker: WorkerReportState, now: float) -> bool:
        """Whether a worker takes requests, and has run none since the totals were taken."""
        has_rested = not worker.in_flight and worker.worked_at < now - SAMPLE_AGE
        return has_rested and is_expected_to_work(worker) and may_be_addressed(worker.worker_id)

    def _expected(self, key: Key) -> list[WorkerReportState]:
        return [worker for worker in self._worker_reports.of_key(key) if is_expected_to_work(worker)]

    def _running(self, key: Key) -> int:
        """How many requests the workers of a group run, as they report."""
        return sum(worker.in_flight for worker in self._worker_reports.of_key(key))

    async def _ask(self, key: Key) -> None:
        # A lost message costs time only: a worker that takes no requests is replaced.
        await self._control.ask_to_reconnect(key)
        self._log.info("workers asked to reconnect", key=key)
