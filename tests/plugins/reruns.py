"""A pytest plugin: a failed test of processes runs once more, and all targets of a run share one budget for that.

Only where `.ci/run` sets `OSRDYNE_RERUNS`, a file for the names of the tests that passed on their second run. The tier
`test` has no second run: its tests depend on no other process. A run with more than three such tests fails (decision
0125); `.ci/run` prints them at its end.
"""

import os
from pathlib import Path

import pytest

LIMIT = 3
"""Of all targets together."""
WITHOUT = "test"
"""The tier that runs each test once."""


def unstable_tests(config: pytest.Config) -> list[str]:
    """The tests that failed and then passed."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return []
    rerun, failed, broken = ({r.nodeid for r in reporter.stats.get(kind, [])} for kind in ("rerun", "failed", "error"))
    return sorted(rerun - failed - broken)


class Reruns:
    """In the process that prints."""

    def __init__(self, names: Path) -> None:
        self._names = names
        self._count = 0

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        with self._names.open("a", encoding="utf-8") as file:
            file.writelines(f"{nodeid}\n" for nodeid in unstable_tests(session.config))
        self._count = len(self._names.read_text(encoding="utf-8").splitlines())
        if self._count > LIMIT and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        for nodeid in unstable_tests(config):
            terminalreporter.write_line(f"UNSTABLE: {nodeid} failed, and passed when it was run once more", red=True)
        if self._count > LIMIT:
            terminalreporter.write_line(f"{self._count} unstable tests; more than {LIMIT} fail the run", red=True)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    names, tier = os.environ.get("OSRDYNE_RERUNS"), config.getoption("tier", None)
    if names is None or tier in {None, WITHOUT}:
        return
    config.option.reruns = 1
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Reruns(Path(names)))
