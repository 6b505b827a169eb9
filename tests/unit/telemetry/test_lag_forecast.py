"""The forecast of a reader's lag, with the figures of plans of capacity."""

from __future__ import annotations

import math

import pytest

from osrdyne.telemetry.forecast import WINDOW, Forecast, Sample, Trend


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
