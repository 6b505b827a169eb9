"""A worker without RabbitMQ: how long it tries, and with which reason it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from osrdyne.errors import BrokerAccessError, BrokerError, BrokerUnavailableError
from osrdyne.testing.clock import VirtualClock
from osrdyne_worker.runtime.connection import stay_connected
from osrdyne_worker.runtime.exit import AccessRefused, ExitReason, NoBroker
from osrdyne_worker.runtime.settings import RuntimeSettings

SETTINGS = RuntimeSettings(queue_missing_timeout=60.0, no_broker_timeout=600.0)


class Outage:
    """Connects for `served` seconds each time; with 0 it never connects."""

    def __init__(self, clock: VirtualClock, error: BrokerError, *, served: float) -> None:
        self.clock, self.error, self.served = clock, error, served
        self.exits: list[ExitReason] = []

    async def serve(self, note_connected: Callable[[], None]) -> None:
        if self.served:
            note_connected()
            await self.clock.sleep(self.served)
        raise self.error

    async def last(self, seconds: float) -> list[type[ExitReason]]:
        staying = asyncio.create_task(
            stay_connected(
                self.serve,
                clock=self.clock,
                settings=SETTINGS,
                request_exit=self.exits.append,
                is_exiting=lambda: False,
            )
        )
        await self.clock.advance(seconds)
        staying.cancel()
        await asyncio.wait({staying})
        return list(dict.fromkeys(type(one) for one in self.exits))


@pytest.mark.parametrize(
    ("error", "served", "seconds", "exits"),
    [
        (BrokerUnavailableError("gone"), 0.0, 590.0, []),
        (BrokerUnavailableError("gone"), 0.0, 610.0, [NoBroker]),
        (BrokerUnavailableError("lost"), 300.0, 3000.0, []),
        (BrokerUnavailableError("lost at once"), 0.001, 3000.0, []),
        (BrokerAccessError("refused"), 0.0, 70.0, [AccessRefused]),
    ],
    ids=["short outage", "long outage", "lost now and then", "lost at once", "refused"],
)
@pytest.mark.proves("broker/broker-gone-for-long")
async def test_worker_ends_after_a_long_time_without_a_connection(
    clock: VirtualClock, error: BrokerError, served: float, seconds: float, exits: list[type[ExitReason]]
) -> None:
    assert await Outage(clock, error, served=served).last(seconds) == exits
