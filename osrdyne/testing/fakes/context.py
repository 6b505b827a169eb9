"""The context of a term for tests that build single components."""

from __future__ import annotations

from osrdyne.aio.clock import Clock
from osrdyne.config.models import LifecycleSettings, RequestSettings, Settings
from osrdyne.metrics import Metrics
from osrdyne.pool.context import TermContext
from osrdyne.protocol.names import PoolNames
from osrdyne.testing.clock import VirtualClock


def make_context(
    settings: Settings | None = None,
    *,
    pool: str | None = None,
    clock: Clock | None = None,
    metrics: Metrics | None = None,
    lifecycle: LifecycleSettings | None = None,
    requests: RequestSettings | None = None,
) -> TermContext:
    """A context with default settings, a virtual clock and new metrics, except those that are given.

    `pool`, `lifecycle` and `requests` replace those parts of the settings:
    `make_context(pool="demo", lifecycle=LifecycleSettings(settle_delay=1.0))`.
    """
    settings = Settings() if settings is None else settings
    parts = {
        "pool": settings.pool if pool is None else settings.pool.model_copy(update={"id": pool}),
        "lifecycle": settings.lifecycle if lifecycle is None else lifecycle,
        "requests": settings.requests if requests is None else requests,
    }
    settings = settings.model_copy(update=parts)
    return TermContext(
        names=PoolNames(settings.pool.id),
        settings=settings,
        clock=VirtualClock() if clock is None else clock,
        metrics=Metrics() if metrics is None else metrics,
    )
