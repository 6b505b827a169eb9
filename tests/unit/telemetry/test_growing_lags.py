"""The forecast of a lag, and one that only grows: logged once, and named by `status` until the reader catches up."""

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


class Readers:
    """The reader `warm`, and the positions of none. `failure`: what `load` raises instead."""

    def __init__(self, *, failure: Exception | None = None) -> None:
        self.failure = failure
        self.clock, self.metrics = VirtualClock(), Metrics()
        options = ConnectionOptions("amqp://localhost")
        self.inspector = LogInspector(
            PoolNames("pool"), options=options, positions=self, clock=self.clock, metrics=self.metrics
        )

    async def load(self) -> list[ReaderPosition]:
        if self.failure is not None:
            raise self.failure
        return []

    def measure(self, minute: int, *, received: int, read: int) -> None:
        """Give the inspector the lag of the reader, without RabbitMQ."""
        lag = ReaderLag("warm", 0, read, received - read, None, 0, 0.0)
        self.inspector._forecasts([PartitionStatus(0, "pool-log-0", 0, received)], [lag], 60.0 * minute)

    def let_lag_grow(self) -> None:
        for minute in range(30):
            self.measure(minute, received=800 * minute, read=720 * minute)
            assert (self.inspector.finding() is None) == (minute < 9)


@pytest.mark.proves("telemetry/lag-reader-only-grows")
def test_growing_lag_is_reported_once_and_until_the_reader_catches_up():
    readers = Readers()
    with capture_logs() as logs:
        readers.let_lag_grow()
    [warning] = logs
    named = {"log_level": "warning", "reader": "warm", "drained": "never", "rate_in": 800, "rate_out": 720}
    assert {name: warning[name] for name in named} == named
    finding = readers.inspector.finding()
    assert finding is not None
    assert (finding.ok, finding.fatal, "warm" in finding.message) == (False, False, True)
    for minute in range(30, 60):
        readers.measure(minute, received=800 * 29, read=min(800 * 29, 720 * minute))
    assert readers.inspector.finding() is None


async def test_metrics_and_finding_of_the_last_reader_end_with_its_position():
    readers = Readers()
    readers.let_lag_grow()
    readers.metrics.telemetry_lag_messages.labels(reader="warm", partition="0").set(5)
    running = asyncio.create_task(readers.inspector.run("log", 1))
    await readers.clock.advance(1.0)
    running.cancel()
    assert readers.inspector.finding() is None
    assert b"osrdyne_telemetry_lag_messages{" not in generate_latest(readers.metrics.registry)


async def test_unexpected_error_while_measuring_does_not_end_the_term():
    readers = Readers(failure=ArithmeticError("unexpected"))
    with capture_logs() as logs:
        running = asyncio.create_task(readers.inspector.run("log", 1))
        await readers.clock.advance(METRICS_INTERVAL + 1.0)
        assert not running.done()
        running.cancel()
    assert [entry["log_level"] for entry in logs] == ["error", "error"]


def test_stored_position_with_numbers_beyond_all_bounds_is_no_position():
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


def test_forecast_is_when_the_difference_of_the_rates_has_drained_the_lag():
    assert (Trend().forecast(), trend(800, 720, minutes=0.5).forecast()) == (None, None)
    assert trend(0, 0).forecast() == Forecast(0.0, 0.0, 0.0, False)
    peak, never = trend(0, 720, lag=108_000).forecast(), trend(800, 720).forecast()
    assert peak is not None
    assert never is not None
    assert (peak.drained, peak.grows) == (pytest.approx((150 - 20) * 60, rel=0.06), False)
    assert (never.rate_in, never.rate_out) == pytest.approx((800, 720), rel=0.06)
    assert (never.drained, never.grows) == (math.inf, True)
    begins_anew = trend(800, 720)
    begins_anew.add(Sample(3000.0, 17_000, 0))
    assert begins_anew.forecast() is None


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
def test_only_a_lag_that_grew_for_the_whole_window_grows(measured, grows):
    forecast = measured.forecast()
    assert forecast is not None
    assert forecast.grows is grows
