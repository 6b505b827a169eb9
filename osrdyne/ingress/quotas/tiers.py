"""The tiers of Azure IoT Hub and of Azure Time Series Insights: the limits of one unit, as presets of quotas and plans.

Prices are settings (`prices`). Source: Azure IoT Hub, "Quotas and throttling".
"""

from __future__ import annotations

from dataclasses import dataclass

MINUTES_A_DAY = 1_440
EVENT_BLOCK_BYTES = 1024


@dataclass(frozen=True, slots=True)
class HubTier:
    """A tier of the hub: the daily quota in blocks of `block_bytes`, and the send rate in messages per second.

    The rate is `rate_per_unit` for each unit, and at least `least_rate` for all units together.
    """

    name: str
    blocks_a_day: int
    block_bytes: int
    rate_per_unit: int
    least_rate: int
    max_units: int

    def rate(self, units: int) -> int:
        """Messages per second of all units."""
        return max(self.least_rate, self.rate_per_unit * units)


@dataclass(frozen=True, slots=True)
class StoreTier:
    """A tier of the store: events per minute and unit, and the events that a unit keeps, both counted in blocks of
    `EVENT_BLOCK_BYTES`."""

    name: str
    events_a_minute: int
    max_units: int
    kept_events: int


HUB_TIERS = {
    tier.name: tier
    for tier in (
        HubTier("iot-hub-free", 8_000, 512, 100, 100, 1),
        HubTier("iot-hub-s1", 400_000, 4096, 12, 100, 200),
        HubTier("iot-hub-s2", 6_000_000, 4096, 120, 120, 200),
        HubTier("iot-hub-s3", 300_000_000, 4096, 6_000, 6_000, 10),
    )
}
STORE_TIERS = {
    tier.name: tier
    for tier in (StoreTier("store-s1", 720, 10, 30_000_000), StoreTier("store-s2", 7_200, 10, 300_000_000))
}
MAX_RETENTION_DAYS = 400
