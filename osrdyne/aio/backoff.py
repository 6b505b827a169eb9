"""Exponential back-off with full control over randomness."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays `initial`, `initial * factor`, … up to `maximum` seconds, each spread by ± `jitter` (a share)."""

    initial: float = 0.5
    factor: float = 2.0
    maximum: float = 30.0
    jitter: float = 0.1

    def delay(self, failures: int, *, spread: Callable[[], float] = random.random) -> float:
        """Seconds to wait after `failures` failures in a row (≥ 1)."""
        exponent = min(max(failures, 1) - 1, 32)
        delay = min(self.maximum, self.initial * self.factor**exponent)
        return delay * (1 + self.jitter * (2 * spread() - 1))
