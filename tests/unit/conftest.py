"""Settings of the unit tests: property tests are judged by their result, not by the load of the machine."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("osrdyne", deadline=None)
settings.load_profile("osrdyne")


@pytest.fixture(autouse=True)
def events_in_reports() -> None:
    """Only warnings, as by default: histories would log a hundred thousand events."""
