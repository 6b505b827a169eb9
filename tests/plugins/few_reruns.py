"""A pytest plugin: a run in which more than two tests passed only on their second run is a failed run.

`.ci/run` runs a failed test once more (`--reruns 1`), and the summary names it. Decision 0125.
"""

from __future__ import annotations

import pytest

LIMIT = 2


def unstable_tests(config: pytest.Config) -> list[str]:
    """The tests that failed and then passed."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return []
    rerun, failed, broken = ({r.nodeid for r in reporter.stats.get(kind, [])} for kind in ("rerun", "failed", "error"))
    return sorted(rerun - failed - broken)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if len(unstable_tests(session.config)) > LIMIT and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for nodeid in (unstable := unstable_tests(config)):
        terminalreporter.write_line(f"UNSTABLE: {nodeid} failed, and passed when it was run once more", red=True)
    if len(unstable) > LIMIT:
        terminalreporter.write_line(f"{len(unstable)} unstable tests; more than {LIMIT} fail the run", red=True)
