"""Fixtures of the tests of the pool: a leader on a broker and a driver in memory, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from osrdyne.config.models import Settings
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.drivers import FakeDriver
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import POOL, Stack, leading, settings_for


@pytest.fixture
def driver(clock: VirtualClock) -> FakeDriver:
    return FakeDriver(clock, pool=POOL)


@pytest.fixture
def settings() -> Settings:
    """Those of the leader; a module or a class of tests may have its own."""
    return settings_for()


@pytest.fixture
async def stack(
    clock: VirtualClock, broker: FakeBroker, driver: FakeDriver, settings: Settings
) -> AsyncIterator[Stack]:
    """What was made with `broker` or `driver` before is there when the leader begins."""
    async with leading(clock, broker=broker, driver=driver, settings=settings) as stack:
        yield stack
