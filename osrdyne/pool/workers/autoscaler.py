"""The worker scaler: looks every few seconds at the groups that may need another number of workers.

One listing of the queues answers for all of them, and none is made while no group is busy or larger than it must be.
It only says how many workers a group should have; the worker groups loop starts them, and lets them finish and go.
"""

from __future__ import annotations

import math

from osrdyne.aio.changes import ChangeFeed
from osrdyne.aio.clock import Clock
from osrdyne.broker.management.listings import Backlog
from osrdyne.drivers.base import InstanceState
from osrdyne.errors import BrokerError
from osrdyne.logs import Logger, get_logger
from osrdyne.metrics import Metrics
from osrdyne.pool.ports import Backlogs
from osrdyne.pool.state.instances import Entry, InstanceBook
from osrdyne.pool.state.worker_reports import WorkerRegistry
from osrdyne.pool.workers.scaling import GroupScale, Sample, ScalingRules, begin, rescale
from osrdyne.protocol.names import Key

SAMPLE_INTERVAL = 5.0
"""Seconds between two samples; RabbitMQ's own figures are no fresher."""


class WorkerScaler:
    """How many workers each group of a term should have."""

    def __init__(
        self,
        rules: ScalingRules,
        *,
        book: InstanceBook,
        registry: WorkerRegistry,
        backlogs: Backlogs,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._rules = rules
        self._book = book
        self._registry = registry
        self._backlogs = backlogs
        self._clock = clock
        self._metrics = metrics
        self._scales: dict[Key, GroupScale] = {}
        self.feed: ChangeFeed[Key] = ChangeFeed()
        """Keys of groups that should have another number of workers."""
        self._log: Logger = get_logger("worker_scaler")

    def wanted(self, key: Key) -> int:
        """Workers that the group should have. One that was just found keeps as many as it has, for a start."""
        if not self._rules.is_elastic:
            return self._rules.minimum  # and nothing is remembered, which nobody would forget
        if key not in self._scales:
            self._scales[key] = begin(self._sample(key, Backlog()), self._rules, alive=len(self._staying(key)))
        return self._scales[key].wanted

    async def run(self) -> None:
        """Look every few seconds, for ever."""
        while True:
            await self._clock.sleep(SAMPLE_INTERVAL if self._rules.is_elastic else math.inf)
            try:
                await self.look()
            except BrokerError as error:
                self._log.warning("listing failed, groups keep their number of workers", error=str(error))

    async def look(self) -> None:
        """One pass."""
        keys = {entry.instance.key for entry in self._book.entries()}
        for key in self._scales.keys() - keys:
            del self._scales[key]
        due = [key for key in keys if self._may_change(key)]
        backlogs = await self._backlogs.list_backlogs() if due else {}
        for key in due:
            backlog = backlogs.get(key, Backlog())
            if backlog.messages == 0:
                self._registry.note_empty_queue(key, sampled_after=backlog.sampled_after)
            self._rescale(key, backlog)
        self._metrics.workers_wanted.set(sum(scale.wanted for scale in self._scales.values()))

    def _may_change(self, key: Key) -> bool:
        """Whether the group could need more workers, since all are busy, or fewer, since it has more than it must."""
        serving = self._serving(key)
        all_busy = bool(serving) and all(self._works(entry) for entry in serving)
        return all_busy or max(len(self._staying(key)), self.wanted(key)) > self._rules.minimum

    def _rescale(self, key: Key, backlog: Backlog) -> None:
        sample = self._sample(key, backlog)
        before = self.wanted(key)
        after = self._scales[key] = rescale(self._scales[key], sample, self._rules)
        if after.wanted == before:
            return
        self._metrics.scalings.labels(direction="up" if after.wanted > before else "down").inc()
        self._log.info("group scaled", key=key, workers=after.wanted, before=before, waiting=backlog.waiting)
        self.feed.notify(key)

    def _sample(self, key: Key, backlog: Backlog) -> Sample:
        serving = self._serving(key)
        in_flight = [self._in_flight(entry) for entry in serving]
        running, busy = sum(in_flight), sum(number > 0 for number in in_flight)
        if backlog.unacknowledged is not None and any(self._is_in_doubt(entry) for entry in serving):
            # What workers have taken and not acknowledged, where they do not say when a request has ended.
            running = backlog.unacknowledged
            busy = min(len(serving), running)
        return Sample(
            at=self._clock.monotonic(),
            waiting=backlog.waiting,
            in_flight=running,
            busy=busy,
            serving=len(serving),
            completed=sum(worker.completed for worker in self._registry.of_key(key)),
        )

    def _staying(self, key: Key) -> list[Entry]:
        """Workers that are there and were not asked to end."""
        entries = self._book.of_key(key)
        return [entry for entry in entries if entry.instance.state is InstanceState.RUNNING and not entry.draining]

    def _serving(self, key: Key) -> list[Entry]:
        return [entry for entry in self._staying(key) if entry.served]

    def _works(self, entry: Entry) -> bool:
        """Whether it runs a request, or did a moment ago."""
        reported = self._registry[entry.instance.worker_id]
        since = self._clock.monotonic() - 2 * SAMPLE_INTERVAL
        if reported is None:
            return False
        # One that says nothing at all may work: only the queue shows it.
        return reported.in_flight > 0 or reported.worked_at > since or reported.is_assumed

    def _is_in_doubt(self, entry: Entry) -> bool:
        return self._registry.is_in_doubt(entry.instance.worker_id)

    def _in_flight(self, entry: Entry) -> int:
        reported = self._registry[entry.instance.worker_id]
        return 0 if reported is None else reported.in_flight
