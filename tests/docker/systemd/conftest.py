"""These tests run in the container: the bus of a user's systemd is in the real runtime directory."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_runtime_directory() -> None:
    """Keep XDG_RUNTIME_DIR: the driver finds the user's D-Bus there. These tests start no daemon."""
