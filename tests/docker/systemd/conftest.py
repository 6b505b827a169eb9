"""These tests run in the container: the bus of a user's systemd is in the real runtime directory."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_runtime_directory():
    """Keep XDG_RUNTIME_DIR: the driver finds the user's D-Bus there. These tests start no daemon."""
