"""The forecast of a lag, and one that only grows: logged once, and named by `status` until the reader catches up."""

from __future__ import annotations

import asyncio
import math

import pytest
from prometheus_client import generate_latest
from structlog.testing import capture_logs

from osrdyne.amqp import ConnectionOptions
from osrdyne.metrics import Metrics
from osrdyne.protocol.names import PoolNames
from osrdyne.telemetry.forecast import WINDOW, Forecast, Sample, Trend
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


def trend(rate_in: float, rate_out: float, *, lag: int = 0, minutes: float = 20.0, batch: float = 0.5) -> Trend:
    """A reader that has read a batch every `batch` minutes, measured every 15 seconds."""
    found = Trend()
    for number in range(int(4 * minutes) + 1):
        at = number / 4
        received = lag + int(rate_in * at)
        found.add(Sample(60 * at, received, min(received, int(rate_out * (at // batch * batch)))))
    return found


def of(found: Trend) -> Forecast:
    forecast = found.forecast()
    assert forecast is not None
    return forecast


@pytest.mark.proves("telemetry/lag-reader-only-grows")
def test_reader_that_gets_more_than_it_reads_never_catches_up() -> None:
    forecast = of(trend(800, 720))
    assert (forecast.rate_in, forecast.rate_out) == pytest.approx((800, 720), rel=0.06)
    assert forecast.drained == math.inf
    assert forecast.grows


def test_peak_is_drained_when_the_difference_of_the_rates_has_it() -> None:
    forecast = of(trend(0, 720, lag=108_000))
    assert forecast.drained == pytest.approx((150 - 20) * 60, rel=0.06)
    assert not forecast.grows


@pytest.mark.parametrize(
    ("measured", "grows"),
    [
        (trend(700, 720, batch=2.0), False),
        (trend(0, 0), False),
        (trend(800, 0, minutes=WINDOW / 60 * 0.5), False),
        (trend(800, 0), True),
    ],
    ids=["in batches", "nothing", "for less than the window", "for the window"],
)
def test_only_a_lag_that_grew_for_the_whole_window_grows(measured: Trend, grows: bool) -> None:
    assert of(measured).grows is grows


def test_forecast_needs_measurements_of_a_minute() -> None:
    assert (Trend().forecast(), trend(800, 720, minutes=0.5).forecast()) == (None, None)
    assert of(trend(0, 0)) == Forecast(0.0, 0.0, 0.0, False)


def test_reader_that_begins_anew_is_measured_anew() -> None:
    found = trend(800, 720)
    found.add(Sample(3000.0, 17_000, 0))
    assert found.forecast() is None
