"""A pytest plugin: the order in which the processes of pytest-xdist get the test files.

Loaded by the test targets of the Makefile, with `--no-loadscope-reorder`: pytest-xdist would put files with few
tests last, and here those are the slow ones.

- The folders whose files take longest come first, so that no process works alone at the end. Within a folder the order
  stays shuffled.
- All files that use the Spark session of their process (fixture `spark`) run in one process: each further process would
  start another Spark, which takes as much processor time as most of these files.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SLOW = ("acceptance", "spark_starts", "spark", "security", "integration", "contract", "component")
FILES = ("test_clusters.py", "test_lost_masters.py", "test_dev_stack.py", "test_faults_from_a_seed.py")
"""The slowest of all."""
SPARK = re.compile(r"(?<![\w.])(?:spark|make_call|tpch_call)(?:: |, |\))")
"""In the text of a test file: a parameter that stands for the fixture `spark`, or for one that needs it. A file that is
missed costs another start of Spark, and nothing else."""


@cache
def uses_spark(file: Path) -> bool:
    return file.parent.name in {"spark", "security"} and SPARK.search(file.read_text(encoding="utf-8")) is not None


def rank(file: Path, tests: Path) -> int:
    """The lower, the earlier; `tests` is the folder of all tests."""
    if file.name in FILES:
        return -2
    if uses_spark(file):
        return -1
    folder = file.relative_to(tests).parts[0]
    return SLOW.index(folder) if folder in SLOW else len(SLOW)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """After pytest-randomly has shuffled."""
    tests = config.rootpath / "tests"
    items.sort(key=lambda item: rank(item.path, tests))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`: one unit of work for each file, and one for all files that use Spark."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # it is there if this hook is called

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return "spark" if uses_spark(config.rootpath / file) else file

    return Scheduling(config, log)
