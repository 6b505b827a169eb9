"""The metrics that are measured for each scrape, so that they always agree with the state of the pool."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

from osrdyne.errors import ConfigurationError, LastValueStoreError
from osrdyne.ingress.routes.retries import in_seconds
from osrdyne.metrics import Metrics, priority_label
from osrdyne.pool.state.groups.transitions import GroupStatus
from osrdyne.pool.state.workers.worker_reports import WorkerState
from osrdyne.pool.views import PoolInspector, ProcessStatus
from osrdyne.telemetry.last_values.store import counts_by_name

LAST_VALUES_TIMEOUT = 2.0
"""Seconds: Prometheus aborts a scrape after ten."""


async def measure(inspector: PoolInspector, metrics: Metrics) -> None:
    """Set the metrics that are measured for each scrape."""
    _measure_groups(inspector, metrics)
    _measure_processes(inspector, metrics)
    _measure_waiting(inspector, metrics)
    _measure_quotas(inspector, metrics)
    await _measure_last_values(inspector, metrics)


def _measure_groups(inspector: PoolInspector, metrics: Metrics) -> None:
    views = inspector.groups()
    groups = Counter(view.state for view in views)
    workers = Counter(worker.state for view in views for worker in view.workers)
    for group_state in GroupStatus:
        metrics.groups.labels(group_state).set(groups[group_state])
    for worker_state in WorkerState:
        metrics.workers.labels(worker_state).set(workers[worker_state])


async def _measure_last_values(inspector: PoolInspector, metrics: Metrics) -> None:
    """Set the counts of the store, which change in the transactions that change values."""
    metrics.last_value_events.clear()
    totals = None
    # `osrdyne last` shows the error. A slow or missing database must not delay the other metrics.
    with suppress(LastValueStoreError, ConfigurationError, TimeoutError):
        async with asyncio.timeout(LAST_VALUES_TIMEOUT):
            totals = await inspector.last_value_totals()
    if totals is not None:
        for outcome, count in counts_by_name(totals).items():
            metrics.last_value_events.labels(outcome).set(count)


def _measure_processes(inspector: PoolInspector, metrics: Metrics) -> None:
    gauges = (metrics.process_keys, metrics.process_heap, metrics.process_memory, metrics.process_memory_share)
    for gauge in gauges:
        gauge.clear()
    views = inspector.processes()
    states = Counter(view.state for view in views)
    for state in ProcessStatus:
        metrics.processes.labels(state).set(states[state])
    for view in views:
        slot = str(view.slot)
        if view.state is not ProcessStatus.ENDED:
            metrics.process_keys.labels(slot).set(len(view.keys))
            if view.heap_used is not None:
                metrics.process_heap.labels(slot).set(view.heap_used)
            if view.memory is not None:
                metrics.process_memory.labels(slot).set(view.memory)
            if view.memory_share is not None:
                metrics.process_memory_share.labels(slot).set(view.memory_share)


def _measure_waiting(inspector: PoolInspector, metrics: Metrics) -> None:
    metrics.waiting.clear()
    metrics.oldest.clear()
    metrics.retrying.clear()
    for delay_ms, requests in inspector.retrying().items():
        metrics.retrying.labels(delay=in_seconds(delay_ms)).set(requests)
    for view in inspector.waiting():
        labels = {"priority": priority_label(view.priority)}
        metrics.waiting.labels(**labels).set(view.requests)
        if view.oldest_age is not None:
            metrics.oldest.labels(**labels).set(view.oldest_age)


def _measure_quotas(inspector: PoolInspector, metrics: Metrics) -> None:
    metrics.quota_used.clear()
    usage = inspector.quota_usage()
    for meter in () if usage is None else usage.meters:
        if meter.ratio is not None:
            metrics.quota_used.labels(meter=meter.name).set(meter.ratio)
