"""A pytest plugin: a run in which a test was skipped or expected to fail is a failed run.

A missing service must fail, not hide.
"""

import pytest

HIDDEN = ("skipped", "xfailed", "xpassed")


def hidden_tests(config: pytest.Config) -> list[str]:
    """The tests of this run that did not really count."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return []
    return sorted({report.nodeid for kind in HIDDEN for report in reporter.stats.get(kind, [])})


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hidden_tests(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for nodeid in hidden_tests(config):
        terminalreporter.write_line(f"NOT ALLOWED: {nodeid} was skipped; every test of this suite must run", red=True)
