"""Fixtures of the unit tests."""

import pytest

from osrdyne.testing.clock import VirtualClock


@pytest.fixture(autouse=True)
def events_in_reports():
    """Only warnings, as by default."""


@pytest.fixture
def clock():
    return VirtualClock()
