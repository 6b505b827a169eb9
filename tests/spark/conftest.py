"""All tests of this folder belong to the tier `spark`."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def all_use_spark(java):
    """Most use the session `spark`, the others start a worker."""
