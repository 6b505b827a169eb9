"""Fixtures of the component tests: several parts of one process together, on fakes and mostly in virtual time."""

from __future__ import annotations

import pytest

from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.broker import FakeBroker


@pytest.fixture(autouse=True)
def events_in_reports() -> None:
    """Only warnings, as by default: histories would log a hundred thousand events."""


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def broker(clock: VirtualClock) -> FakeBroker:
    return FakeBroker(clock)
