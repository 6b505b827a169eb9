"""A pytest plugin: the folders whose files take longest come first, so that no process works alone at the end.

Loaded by `make test`, with `--no-loadscope-reorder`: pytest-xdist would put files with few tests last, and here those
are the slow ones. Within a folder the order stays shuffled.
"""

from __future__ import annotations

import pytest

SLOW = ("acceptance", "spark", "security", "integration", "contract")
FILES = ("test_demo.py", "test_dev_stack.py", "test_faults_from_a_seed.py")
"""The slowest of all."""


def rank(parts: tuple[str, ...]) -> int:
    """The lower, the earlier; `parts` is the path of a test file."""
    if parts[-1] in FILES:
        return -1
    return next((place for place, folder in enumerate(SLOW) if folder in parts), len(SLOW))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """After pytest-randomly has shuffled."""
    items.sort(key=lambda item: rank(item.path.parts[-2:]))
