"""How many workers a group needs, as a pure function of what was measured. No I/O and no clock.

The lag of a group is what waits, divided by what its workers complete in a second. A group gets as many workers as keep
that below `target_lag`, and at least as many as were busy on average. More come at once; fewer only when fewer were
enough for the whole of `cooldown`, because loading a worker is dear. Source: docs/drivers.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

HALF_LIFE = 60.0
"""Seconds after which a measurement counts half."""


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


@dataclass(frozen=True, slots=True)
class Sample:
    """A group at one moment (`at`, monotonic seconds).

    `waiting`: requests that nobody has taken. `in_flight`: requests that are run. `busy`: workers that run any;
    `serving`: workers that are ready to. `completed`: requests ever completed by the workers that are there.
    """

    at: float
    waiting: int
    in_flight: int
    busy: int
    serving: int
    completed: int


@dataclass(frozen=True, slots=True)
class GroupScale:
    """What is remembered of a group: the number of workers, and the work measured, which fades.

    `work_seconds` of single requests, `elapsed_seconds` on the clock, `done` requests. `low_since`: since when fewer
    workers would do, and `low_peak`: how many at most.
    """

    wanted: int
    sample: Sample
    work_seconds: float = 0.0
    elapsed_seconds: float = 0.0
    done: float = 0.0
    low_since: float | None = None
    low_peak: int = 0

    @property
    def rate(self) -> float | None:
        """Requests that one slot of a worker completes in a second. While none was completed, the most it can be."""
        return max(self.done, 1.0) / self.work_seconds if self.work_seconds else None

    @property
    def load(self) -> float:
        """Requests that were run at once, on average."""
        return self.work_seconds / self.elapsed_seconds if self.elapsed_seconds else 0.0


def begin(sample: Sample, rules: ScalingRules, *, alive: int) -> GroupScale:
    """The scale of a group that is seen for the first time: what is there is taken for right."""
    return GroupScale(rules.clamp(alive), sample)


def rescale(scale: GroupScale, sample: Sample, rules: ScalingRules) -> GroupScale:
    """The scale after the next sample."""
    scale = _measure(scale, sample, rules)
    need = needed(scale, rules)
    if need >= scale.wanted:
        return replace(scale, wanted=need, low_since=None, low_peak=0)
    since = sample.at if scale.low_since is None else scale.low_since
    peak = max(need, scale.low_peak)
    if sample.at - since < rules.cooldown:
        return replace(scale, low_since=since, low_peak=peak)
    return replace(scale, wanted=peak, low_since=None, low_peak=0)


def needed(scale: GroupScale, rules: ScalingRules) -> int:
    """Workers that keep the lag below the target, and no fewer than are busy."""
    sample, rate = scale.sample, scale.rate
    slots = scale.load
    if rate is not None:
        slots = max(slots, sample.waiting / (rate * rules.target_lag))
    # The tolerance keeps rounding errors of floating point numbers from asking for a worker more.
    return rules.clamp(max(sample.busy, math.ceil(slots / rules.concurrency - 1e-6)))


def _measure(scale: GroupScale, sample: Sample, rules: ScalingRules) -> GroupScale:
    """Add what was done since the last sample; what lies back counts less and less."""
    before = scale.sample
    passed = max(0.0, sample.at - before.at)
    fading = 0.5 ** (passed / HALF_LIFE)
    # Where requests wait, every slot is taken, whatever was reported: reports of short requests come too late.
    running = before.serving * rules.concurrency if before.waiting and sample.waiting else before.in_flight
    return replace(
        scale,
        sample=sample,
        work_seconds=scale.work_seconds * fading + running * passed,
        elapsed_seconds=scale.elapsed_seconds * fading + passed,
        done=scale.done * fading + max(0, sample.completed - before.completed),
    )
