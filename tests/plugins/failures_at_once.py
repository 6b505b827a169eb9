"""A pytest plugin: print each failure as soon as it is known, with its duration, also if the test runs once more.

A run that is stopped by a time limit never reaches the summary of pytest.
"""

import pytest


class FailuresAtOnce:
    """Prints through pytest's own terminal reporter."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed and report.outcome != "rerun":  # type: ignore[comparison-overlap]  # pytest-rerunfailures
            return
        self._terminal.ensure_newline()
        self._terminal.write_line(f"{report.nodeid}: {report.when} failed after {report.duration:.1f} s")
        self._terminal.write_line(report.longreprtext)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Only in the process that prints."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(terminal))
