"""A worker without RabbitMQ: how long it tries, and with which reason it ends."""

import asyncio

import pytest

from osrdyne.errors import BrokerAccessError, BrokerUnavailableError
from osrdyne_worker.runtime.connection import stay_connected
from osrdyne_worker.runtime.exit import AccessRefused, ExitReason, NoBroker
from osrdyne_worker.runtime.settings import RuntimeSettings

SETTINGS = RuntimeSettings(queue_missing_timeout=60.0, no_broker_timeout=600.0)


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
async def test_worker_ends_after_a_long_time_without_a_connection(clock, error, served, seconds, exits):
    """`served`: how long each connection lasts; with 0 there is none."""
    requested: list[ExitReason] = []

    async def serve(note_connected):
        if served:
            note_connected()
            await clock.sleep(served)
        raise error

    options = {"clock": clock, "settings": SETTINGS, "request_exit": requested.append, "is_exiting": lambda: False}
    staying = asyncio.create_task(stay_connected(serve, **options))  # type: ignore[arg-type]
    await clock.advance(seconds)
    staying.cancel()
    await asyncio.wait({staying})
    assert list(dict.fromkeys(map(type, requested))) == exits
