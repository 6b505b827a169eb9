"""A lag that only grows: logged once, and named by `status` until the reader catches up."""

from __future__ import annotations

from structlog.testing import capture_logs

from osrdyne.amqp import ConnectionOptions
from osrdyne.metrics import Metrics
from osrdyne.protocol.names import PoolNames
from osrdyne.telemetry.positions import ReaderPosition
from osrdyne.telemetry.status import LogInspector, PartitionStatus, ReaderLag
from osrdyne.testing.clock import VirtualClock


class NoPositions:
    async def load(self) -> list[ReaderPosition]:
        return []


def test_growing_lag_is_reported_once_and_until_the_reader_catches_up() -> None:
    inspector = LogInspector(
        PoolNames("pool"),
        options=ConnectionOptions("amqp://localhost"),
        positions=NoPositions(),
        clock=VirtualClock(),
        metrics=Metrics(),
    )

    def measure(minute: int, received: int, read: int) -> None:
        lag = ReaderLag("warm", 0, read, received - read, None, 0, 0.0)
        inspector._forecasts([PartitionStatus(0, "pool-log-0", 0, received)], [lag], 60.0 * minute)

    with capture_logs() as logs:
        for minute in range(30):
            measure(minute, 800 * minute, 720 * minute)
            assert (inspector.finding() is None) == (minute < 9)
    [warning] = logs
    assert (warning["event"], warning["log_level"]) == ("lag of a reader only grows", "warning")
    assert (warning["reader"], warning["drained"], warning["rate_in"], warning["rate_out"]) == (
        "warm",
        "never",
        800,
        720,
    )
    finding = inspector.finding()
    assert finding is not None
    assert (finding.ok, finding.fatal, finding.message) == (False, False, "the lag of warm only grows")

    for minute in range(30, 60):
        measure(minute, 800 * 29, min(800 * 29, 720 * minute))
    assert inspector.finding() is None
