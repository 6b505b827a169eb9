"""A lag that only grows: logged once, and named by `status` until the reader catches up."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import generate_latest
from structlog.testing import capture_logs

from osrdyne.amqp import ConnectionOptions
from osrdyne.metrics import Metrics
from osrdyne.protocol.names import PoolNames
from osrdyne.telemetry.positions import ReaderPosition, parse_position
from osrdyne.telemetry.status import METRICS_INTERVAL, LogInspector, PartitionStatus, ReaderLag
from osrdyne.testing.clock import VirtualClock


class Positions:
    """Of no reader. `failure`: what `load` raises instead."""

    failure: Exception | None = None

    async def load(self) -> list[ReaderPosition]:
        if self.failure is not None:
            raise self.failure
        return []


def inspector_of(
    *, positions: Positions | None = None, clock: VirtualClock | None = None, metrics: Metrics | None = None
) -> LogInspector:
    return LogInspector(
        PoolNames("pool"),
        options=ConnectionOptions("amqp://localhost"),
        positions=positions or Positions(),
        clock=clock or VirtualClock(),
        metrics=metrics or Metrics(),
    )


def measure(inspector: LogInspector, minute: int, *, received: int, read: int) -> None:
    """Give it the lag of the reader `warm`, without RabbitMQ."""
    lag = ReaderLag("warm", 0, read, received - read, None, 0, 0.0)
    inspector._forecasts([PartitionStatus(0, "pool-log-0", 0, received)], [lag], 60.0 * minute)


def let_lag_grow(inspector: LogInspector) -> None:
    for minute in range(30):
        measure(inspector, minute, received=800 * minute, read=720 * minute)
        assert (inspector.finding() is None) == (minute < 9)


@pytest.mark.proves("telemetry/lag-reader-only-grows")
def test_growing_lag_is_reported_once_and_until_the_reader_catches_up() -> None:
    inspector = inspector_of()
    with capture_logs() as logs:
        let_lag_grow(inspector)
    [warning] = logs
    assert warning["log_level"] == "warning"
    named = {"reader": "warm", "drained": "never", "rate_in": 800, "rate_out": 720}
    assert {name: warning[name] for name in named} == named
    finding = inspector.finding()
    assert finding is not None
    assert (finding.ok, finding.fatal, "warm" in finding.message) == (False, False, True)
    for minute in range(30, 60):
        measure(inspector, minute, received=800 * 29, read=min(800 * 29, 720 * minute))
    assert inspector.finding() is None


async def test_metrics_and_finding_of_the_last_reader_end_with_its_position() -> None:
    clock, metrics = VirtualClock(), Metrics()
    inspector = inspector_of(clock=clock, metrics=metrics)
    let_lag_grow(inspector)
    metrics.telemetry_lag_messages.labels(reader="warm", partition="0").set(5)
    running = asyncio.create_task(inspector.run("log", 1))
    await clock.advance(1.0)
    running.cancel()
    assert inspector.finding() is None
    assert b"osrdyne_telemetry_lag_messages{" not in generate_latest(metrics.registry)


async def test_unexpected_error_while_measuring_does_not_end_the_term() -> None:
    clock, positions = VirtualClock(), Positions()
    positions.failure = ArithmeticError("unexpected")
    with capture_logs() as logs:
        running = asyncio.create_task(inspector_of(positions=positions, clock=clock).run("log", 1))
        await clock.advance(METRICS_INTERVAL + 1.0)
        assert not running.done()
        running.cancel()
    assert [entry["log_level"] for entry in logs] == ["error", "error"]


def test_stored_position_with_numbers_beyond_all_bounds_is_no_position() -> None:
    assert parse_position("warm", {"offsets": {"0": 1}, "at": 10**400}) is None
    assert parse_position("warm", {"offsets": {"1" * 5000: 1}, "at": 1}) is None
