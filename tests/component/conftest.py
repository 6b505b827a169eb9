"""Fixtures of the component tests: several parts of one process together, on fakes and mostly in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from osrdyne.config.models import Settings
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.drivers import FakeDriver
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import POOL, Stack, leading, settings_for


@pytest.fixture(autouse=True)
def events_in_reports() -> None:
    """Only warnings, as by default: histories would log a hundred thousand events."""


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def broker(clock: VirtualClock) -> FakeBroker:
    return FakeBroker(clock)


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
