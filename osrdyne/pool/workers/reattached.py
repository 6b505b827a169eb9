"""Workers that get nothing although they consume their queue: RabbitMQ before 4.0 has attached them to a queue that
another client deleted and declared again, and drops what it delivers to them (broker: reattached-consumers).

Such requests count as unacknowledged, while the workers report that they run none. The workers are asked to connect
anew, which returns the requests to the queue. So are the workers of a queue that lost its binding. Not used with later
versions of RabbitMQ. Loses no request: nothing is acknowledged here.
"""

from __future__ import annotations

import asyncio

from osrdyne.aio.signals import ChangeFeed, Subscription
from osrdyne.errors import BrokerError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import QueueListings
from osrdyne.pool.state.workers.worker_reports import WorkerRegistry
from osrdyne.pool.workers.control import WorkerControl
from osrdyne.pool.workers.liveness import is_expected_to_work
from osrdyne.protocol.names import Key

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
        self._asked: set[Key] = set()  # Groups whose messages no worker reports, although they were asked.
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
        idle = {worker.key for worker in self._worker_reports.all() if self._is_idle(worker.key)}
        self._asked &= idle
        if not idle:
            return  # without a listing
        totals = await self._listings.list_message_totals()
        holding = {key for key in idle if key in totals and totals[key].messages > 0}
        # Once: the messages may be with a consumer that is not a worker of this pool. Liveness handles what remains.
        self._asked &= holding
        if not holding - self._asked:
            return
        await self._clock.sleep(REPORT_TIME)
        for key in holding - self._asked:
            if self._is_idle(key):
                self._asked.add(key)
                await self._ask(key)

    def _is_idle(self, key: Key) -> bool:
        """Whether workers of the group take requests, and none has worked since the totals were taken."""
        workers = [worker for worker in self._worker_reports.of_key(key) if is_expected_to_work(worker)]
        since = self._clock.monotonic() - SAMPLE_AGE
        return bool(workers) and all(not worker.in_flight and worker.worked_at < since for worker in workers)

    async def _ask(self, key: Key) -> None:
        # A lost message costs time only: a worker that takes no requests is replaced.
        await self._control.ask_to_reconnect(key)
        self._log.info("workers asked to reconnect", key=key)
