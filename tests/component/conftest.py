"""Fixtures of the component tests: several parts of one process together, on fakes and mostly in virtual time."""

import pytest

from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.drivers import FakeDriver
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import POOL, leading, settings_for


@pytest.fixture(autouse=True)
def events_in_reports():
    """Only warnings, as by default: histories would log a hundred thousand events."""


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def broker(clock):
    return FakeBroker(clock)


@pytest.fixture
def driver(clock):
    return FakeDriver(clock, pool=POOL)


@pytest.fixture
def settings():
    """Those of the leader; a module or a class of tests may have its own."""
    return settings_for()


@pytest.fixture
async def stack(clock, broker, driver, settings):
    """What was made with `broker` or `driver` before is there when the leader begins."""
    async with leading(clock, broker=broker, driver=driver, settings=settings) as stack:
        yield stack
