"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest

from osrdyne.testing.clock import VirtualClock


@pytest.fixture(autouse=True)
def events_in_reports() -> None:
    """Only warnings, as by default."""


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()
