"""A pytest plugin: the order in which the processes of pytest-xdist get the test files.

Loaded by `make test`, with `--no-loadscope-reorder`: pytest-xdist would put files with few tests last, and here those
are the slow ones.

- The folders whose files take longest come first, so that no process works alone at the end. Within a folder the order
  stays shuffled.
- All files that use the Spark session of their process (fixture `spark`) run in one process: each further process would
  start another Spark, which takes as much processor time as most of these files.
"""

from __future__ import annotations

from typing import Any

import pytest

SLOW = ("acceptance", "spark", "security", "integration", "contract", "component")
FILES = ("test_demo.py", "test_dev_stack.py", "test_faults_from_a_seed.py")
"""The slowest of all."""
SPARK = (
    "test_handler_sessions.py", "test_poison_source.py", "test_second_net.py", "test_spark_session.py",
    "test_sql_datasets.py", "test_sql_escape.py", "test_sql_fuzz.py", "test_sql_pipeline.py", "test_tpcds.py",
)  # fmt: skip
"""Tests with the fixture `spark`."""


def rank(parts: tuple[str, ...]) -> int:
    """The lower, the earlier; `parts` is the path of a test file below the folder of all tests."""
    if parts[-1] in FILES:
        return -2
    if parts[-1] in SPARK:
        return -1
    return SLOW.index(parts[0]) if parts[0] in SLOW else len(SLOW)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """After pytest-randomly has shuffled."""
    tests = config.rootpath / "tests"
    items.sort(key=lambda item: rank(item.path.relative_to(tests).parts))
    wrong = {item.path.name for item in items if "spark" in getattr(item, "fixturenames", ())} - set(SPARK)
    if wrong:
        raise pytest.UsageError(f"{', '.join(sorted(wrong))}: uses the fixture `spark`; add it to SPARK in {__file__}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`: one unit of work for each file, and one for all files in SPARK."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # it is there if this hook is called

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return "spark" if file.rpartition("/")[2] in SPARK else file

    return Scheduling(config, log)
