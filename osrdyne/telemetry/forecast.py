"""The rate at which the lag of a reader changes, and when the reader will have caught up. Pure.

Rates are messages a minute, from measurements of the last `WINDOW` seconds. Source: docs/reference/telemetry/log.md.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

WINDOW = 600.0
_MIN_SPAN = 60.0
"""Seconds that measurements must span for a rate."""
_MIN_GAP = 5.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A measurement at a monotonic time: the next offsets of the log and of the reader, summed over all partitions."""

    at: float
    received: int
    read: int

    @property
    def lag(self) -> int:
        return self.received - self.read


@dataclass(frozen=True, slots=True)
class Forecast:
    """`drained`: seconds until the reader has read everything if both rates stay; `inf`: never. `grows`: the lag has
    grown through the whole window."""

    rate_in: float
    rate_out: float
    drained: float
    grows: bool


class Trend:
    """The measurements of one reader."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()

    def add(self, sample: Sample) -> None:
        if self._samples and (sample.read < self._samples[-1].read or sample.received < self._samples[-1].received):
            self._samples.clear()  # the table or the log was removed and created again
        if len(self._samples) >= 2 and sample.at - self._samples[-2].at < _MIN_GAP:
            self._samples.pop()  # the new sample replaces the last one: requests to the API may follow closely
        self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1].at <= sample.at - WINDOW:
            self._samples.popleft()

    def forecast(self) -> Forecast | None:
        """The forecast; None before measurements span a minute."""
        if not self._samples or (span := self._samples[-1].at - self._samples[0].at) < _MIN_SPAN:
            return None
        first, last = self._samples[0], self._samples[-1]
        rate_in, rate_out = (60 * (b - a) / span for a, b in ((first.received, last.received), (first.read, last.read)))
        drained = 0.0
        if last.lag > 0:
            drained = 60 * last.lag / (rate_out - rate_in) if rate_out > rate_in else math.inf
        return Forecast(rate_in, rate_out, drained, self._grows(span))

    def _grows(self, span: float) -> bool:
        """Whether the lag has grown through the window. The lag of a reader that reads in batches rises and falls, so
        the least lag of each third of the window is compared."""
        if span < 0.9 * WINDOW:
            return False
        begin = self._samples[0].at
        thirds: list[list[int]] = [[], [], []]
        for one in self._samples:
            thirds[min(2, int(3 * (one.at - begin) / span))].append(one.lag)
        if not all(thirds):
            return False
        least = [min(one) for one in thirds]
        return max(thirds[0]) < least[2] and least[0] < least[1] < least[2]
