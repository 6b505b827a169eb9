"""All tests of this folder belong to the tier `spark`."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def all_use_spark(java: None) -> None:
    """Most use the session `spark`, the others start a worker."""
