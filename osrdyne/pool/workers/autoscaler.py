"""The autoscaler: how many workers each group should have.

The lag of a group is its waiting requests divided by the requests that its workers complete per second. A group gets
as many workers as keep the lag below `target_lag`, and at least as many as were busy on average. More workers are
requested at once; fewer only when fewer were enough for the whole of `cooldown`, because loading a worker is expensive.
The calculation is a set of pure functions (`rescale`). `Autoscaler` samples the groups every few seconds with one
listing for all of them, and makes no listing while no group is busy or above its minimum. The worker groups loop starts
and drains workers accordingly. Source: docs/reference/drivers/scaling.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from osrdyne.aio.signals import ChangeFeed
from osrdyne.broker.management.listings import Backlog
from osrdyne.drivers.base import InstanceState
from osrdyne.errors import BrokerError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import QueueListings
from osrdyne.pool.state.workers.instances import InstanceInventory, InventoryEntry
from osrdyne.pool.state.workers.worker_reports import WorkerRegistry
from osrdyne.protocol.names import Key

HALF_LIFE = 60.0  # Seconds after which a measurement counts half.


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """`worker.scaling`; `concurrency` is the requests that one worker runs at once. Times in seconds."""

    minimum: int = 1
    maximum: int = 1
    target_lag: float = 30.0
    cooldown: float = 300.0
    concurrency: int = 1

    @property
    def is_elastic(self) -> bool:
        return self.minimum < self.maximum

    def clamp(self, workers: int) -> int:
        return min(self.maximum, max(self.minimum, workers))

    def limited(self, readers: int) -> ScalingRules:
        """The rules of a group that may have at most `readers` workers."""
        if readers >= self.maximum:
            return self
        return replace(self, minimum=min(self.minimum, readers), maximum=readers)


@dataclass(frozen=True, slots=True)
class Sample:
    """A group at one moment (`at`, monotonic seconds).

    `waiting`: requests that no worker has taken. `in_flight`: running requests. `busy`: workers that run any;
    `serving`: workers that are ready. `completed`: requests ever completed by the present workers.
    """

    at: float
    waiting: int
    in_flight: int
    busy: int
    serving: int
    completed: int


@dataclass(frozen=True, slots=True)
class GroupScale:
    """The state of a group: its number of workers, and decaying measurements.

    `work_seconds`: running time of requests, `elapsed_seconds`: wall time, `done`: completed requests. `low_since`:
    since when fewer workers would do, and `low_peak`: how many at most.
    """

    desired: int
    sample: Sample
    work_seconds: float = 0.0
    elapsed_seconds: float = 0.0
    done: float = 0.0
    low_since: float | None = None
    low_peak: int = 0

    @property
    def rate(self) -> float | None:
        """Requests that one slot of a worker completes per second; an upper bound until one was completed."""
        return max(self.done, 1.0) / self.work_seconds if self.work_seconds else None

    @property
    def load(self) -> float:
        """Average number of running requests."""
        return self.work_seconds / self.elapsed_seconds if self.elapsed_seconds else 0.0


def begin(sample: Sample, rules: ScalingRules, *, alive: int) -> GroupScale:
    """The scale of a group that is seen for the first time: the present number of workers counts as right."""
    return GroupScale(rules.clamp(alive), sample)


def rescale(scale: GroupScale, sample: Sample, rules: ScalingRules) -> GroupScale:
    """The scale after the next sample."""
    scale = _measure(scale, sample, rules)
    need = needed(scale, rules)
    if need >= scale.desired:
        return replace(scale, desired=need, low_since=None, low_peak=0)
    since = sample.at if scale.low_since is None else scale.low_since
    peak = max(need, scale.low_peak)
    if sample.at - since < rules.cooldown:
        return replace(scale, low_since=since, low_peak=peak)
    return replace(scale, desired=peak, low_since=None, low_peak=0)


def needed(scale: GroupScale, rules: ScalingRules) -> int:
    """Workers that keep the lag below the target, and at least as many as are busy."""
    sample, rate = scale.sample, scale.rate
    slots = scale.load
    if rate is not None:
        slots = max(slots, sample.waiting / (rate * rules.target_lag))
    # The tolerance keeps floating-point rounding from requesting one worker more.
    return rules.clamp(max(sample.busy, math.ceil(slots / rules.concurrency - 1e-6)))


def _measure(scale: GroupScale, sample: Sample, rules: ScalingRules) -> GroupScale:
    """Add the work since the last sample; older measurements decay."""
    before = scale.sample
    passed = max(0.0, sample.at - before.at)
    fading = 0.5 ** (passed / HALF_LIFE)
    # While requests wait, every slot counts as taken: reports of short requests come too late to show it.
    running = before.serving * rules.concurrency if before.waiting and sample.waiting else before.in_flight
    return replace(
        scale,
        sample=sample,
        work_seconds=scale.work_seconds * fading + running * passed,
        elapsed_seconds=scale.elapsed_seconds * fading + passed,
        done=scale.done * fading + max(0, sample.completed - before.completed),
    )


SAMPLE_INTERVAL = 5.0  # Seconds between two samples; RabbitMQ's own figures are no fresher.


class Autoscaler:
    """The desired number of workers of each group of a term."""

    def __init__(
        self,
        context: TermContext,
        rules: ScalingRules,
        *,
        instances: InstanceInventory,
        worker_reports: WorkerRegistry,
        listings: QueueListings,
        concurrency_of: Callable[[Key], int] | None = None,
        readers_of: Callable[[Key], int | None] | None = None,
    ) -> None:
        """`concurrency_of`: the requests that a worker of a group runs at once, if groups differ. `readers_of`: the
        maximum number of workers of a group (MaxConcurrentReaders), if groups differ."""
        self._rules = rules
        self._concurrency_of = concurrency_of
        self._readers_of = readers_of
        self._instances = instances
        self._worker_reports = worker_reports
        self._listings = listings
        self._clock = context.clock
        self._metrics = context.metrics
        self._scales: dict[Key, GroupScale] = {}
        self.feed: ChangeFeed[Key] = ChangeFeed()  # Keys of groups that should have another number of workers.
        self._log: Logger = get_logger("autoscaler")

    def desired(self, key: Key) -> int:
        """The desired number of workers of a group. A group that was just found keeps its number at first."""
        rules = self._limited_rules(key)
        if not self._rules.is_elastic:
            return rules.minimum  # no state is kept that would have to be dropped
        if key not in self._scales:
            self._scales[key] = begin(self._sample(key, Backlog()), rules, alive=len(self._staying(key)))
        # The limit may have changed since the latest sample.
        return rules.clamp(self._scales[key].desired)

    def readers(self, key: Key) -> int | None:
        """The maximum number of workers of a group at any moment; None: no limit of its own."""
        return None if self._readers_of is None else self._readers_of(key)

    async def run(self) -> None:
        """Sample at intervals. Runs until cancelled."""
        while True:
            await self._clock.sleep(SAMPLE_INTERVAL if self._rules.is_elastic else math.inf)
            try:
                await self.reconcile()
            except BrokerError as error:
                self._log.warning("autoscaler listing failed", error=str(error))

    async def reconcile(self) -> None:
        """Sample the groups once and rescale them."""
        keys = {entry.instance.key for entry in self._instances.entries()}
        for key in self._scales.keys() - keys:
            del self._scales[key]
        due = [key for key in keys if self._may_change(key)]
        backlogs = await self._listings.list_backlogs() if due else {}
        for key in due:
            backlog = backlogs.get(key, Backlog())
            if backlog.messages == 0:
                self._worker_reports.note_empty_queue(key, sampled_after=backlog.sampled_after)
            self._rescale(key, backlog)
        self._metrics.workers_wanted.set(sum(scale.desired for scale in self._scales.values()))

    def _may_change(self, key: Key) -> bool:
        """Whether the group may need more workers because all are busy, or fewer because it is above its minimum."""
        serving = self._serving(key)
        all_busy = bool(serving) and all(self._works(entry) for entry in serving)
        return all_busy or max(len(self._staying(key)), self.desired(key)) > self._rules.minimum

    def _rescale(self, key: Key, backlog: Backlog) -> None:
        sample = self._sample(key, backlog)
        before = self.desired(key)
        after = self._scales[key] = rescale(self._scales[key], sample, self._rules_of(key))
        if after.desired == before:
            return
        self._metrics.scalings.labels(direction="up" if after.desired > before else "down").inc()
        self._log.info("group scaled", key=key, workers=after.desired, before=before, waiting=backlog.waiting)
        self.feed.notify(key)

    def _rules_of(self, key: Key) -> ScalingRules:
        rules = self._limited_rules(key)
        if self._concurrency_of is None:
            return rules
        return replace(rules, concurrency=self._concurrency_of(key))

    def _limited_rules(self, key: Key) -> ScalingRules:
        readers = self.readers(key)
        return self._rules if readers is None else self._rules.limited(readers)

    def _sample(self, key: Key, backlog: Backlog) -> Sample:
        serving = self._serving(key)
        in_flight = [self._in_flight(entry) for entry in serving]
        running, busy = sum(in_flight), sum(number > 0 for number in in_flight)
        if backlog.unacknowledged is not None and any(self._is_opaque(entry) for entry in serving):
            # Delivered and unacknowledged requests, because these workers do not report the end of a request.
            running = backlog.unacknowledged
            busy = min(len(serving), running)
        return Sample(
            at=self._clock.monotonic(),
            waiting=backlog.waiting,
            in_flight=running,
            busy=busy,
            serving=len(serving),
            completed=sum(worker.completed for worker in self._worker_reports.of_key(key)),
        )

    def _staying(self, key: Key) -> list[InventoryEntry]:
        """Workers that run and were not asked to end."""
        entries = self._instances.of_key(key)
        return [entry for entry in entries if entry.instance.state is InstanceState.RUNNING and not entry.draining]

    def _serving(self, key: Key) -> list[InventoryEntry]:
        return [entry for entry in self._staying(key) if entry.served]

    def _works(self, entry: InventoryEntry) -> bool:
        """Whether it runs a request, or did recently."""
        reported = self._worker_reports[entry.instance.worker_id]
        since = self._clock.monotonic() - 2 * SAMPLE_INTERVAL
        if reported is None:
            return False
        # A worker that reports nothing may be working: only the queue shows it.
        return reported.in_flight > 0 or reported.worked_at > since or reported.is_assumed

    def _is_opaque(self, entry: InventoryEntry) -> bool:
        return self._worker_reports.is_opaque(entry.instance.worker_id)

    def _in_flight(self, entry: InventoryEntry) -> int:
        reported = self._worker_reports[entry.instance.worker_id]
        return 0 if reported is None else reported.in_flight
