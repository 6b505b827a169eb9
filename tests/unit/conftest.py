"""Settings of the unit tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def events_in_reports() -> None:
    """Only warnings, as by default."""
