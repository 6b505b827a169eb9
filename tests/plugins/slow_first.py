"""A pytest plugin: the folders whose files take longest come first, so that no process works alone at the end.

Loaded by `make test`, with `--no-loadscope-reorder`: pytest-xdist would put files with few tests last, and here those
are the slow ones. Within a folder the order stays shuffled.
"""

from __future__ import annotations

import pytest

SLOW = ("acceptance", "spark", "security", "integration", "contract", "component")
FILES = ("test_demo.py", "test_dev_stack.py", "test_faults_from_a_seed.py")
"""The slowest of all."""


def rank(parts: tuple[str, ...]) -> int:
    """The lower, the earlier; `parts` is the path of a test file below the folder of all tests."""
    if parts[-1] in FILES:
        return -1
    return SLOW.index(parts[0]) if parts[0] in SLOW else len(SLOW)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """After pytest-randomly has shuffled."""
    tests = config.rootpath / "tests"
    items.sort(key=lambda item: rank(item.path.relative_to(tests).parts))
