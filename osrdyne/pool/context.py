"""The shared dependencies of one leader's term. The term builds it, and each component takes it as `context`."""

from __future__ import annotations

from dataclasses import dataclass

from osrdyne.aio.clock import Clock
from osrdyne.config.models import Settings
from osrdyne.metrics import Metrics
from osrdyne.protocol.names import PoolNames


@dataclass(frozen=True, slots=True)
class TermContext:
    """The names of the pool's objects in RabbitMQ, the settings, the clock and the metrics."""

    names: PoolNames
    settings: Settings
    clock: Clock
    metrics: Metrics
