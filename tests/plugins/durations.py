"""A pytest plugin: what a tier took, by test, fixture and file, and whether that is within its budget.

The targets write `build/junit/TIER.xml`, in which each test has the seconds of its fixtures and the programs that it
started; `tools/test_times` prints the costly ones. A whole tier that takes more than half as long again as its budget
is a failed run, and the output names the files that grew. The budget is for the reference machine: a slower one gets as
much more time as it needs for a fixed calculation.
"""

import json
import time
from collections import Counter
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

BUDGETS = {"test": 300, "process": 180, "spark": 300, "rabbitmq4": 100, "docker": 220, "kubernetes": 100}
"""Seconds of wall time on two cores."""
TOLERANCE = 1.5
LEAST = 0.05
"""Seconds of a fixture that are worth an entry."""
CURRENT = pytest.StashKey[pytest.Item]()


def calculation(rounds: int = 200_000) -> float:
    """Seconds of a fixed calculation."""
    began = time.perf_counter()
    table: dict[int, int] = {}
    for number in range(rounds):
        table[number % 5003] = table.get((number * 7) % 5003, 0) + number
    return time.perf_counter() - began


def floor() -> float:
    """Seconds of the calculation on two cores at once, the best of five."""
    with ProcessPoolExecutor(2) as executor:
        return min(max(executor.map(calculation, [200_000] * 2)) for _ in range(5))


class Budget:
    """In the process that prints: compares the wall time of a whole tier with its budget."""

    def __init__(self, config: pytest.Config, tier: str) -> None:
        kept = json.loads((config.rootpath / "tests" / "durations.json").read_text(encoding="utf-8"))
        self._files: dict[str, float] = kept["files"]
        self._factor = max(1.0, floor() / kept["floor"])
        self._budget = BUDGETS[tier]
        self._tier = tier
        self._began = time.monotonic()
        self._seconds: Counter[str] = Counter()
        self._took = 0.0

    @property
    def is_exceeded(self) -> bool:
        return self._took > self._budget * self._factor * TOLERANCE

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.location[0]] += report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._took = time.monotonic() - self._began
        if self.is_exceeded and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        line = f"tier {self._tier}: {self._took:.0f} s; its budget is {self._budget} s on the reference machine"
        terminalreporter.write_line(f"{line}, and this machine needs {self._factor:.2f} times as long")
        if not self.is_exceeded:
            return
        grown = {file: took / self._factor - self._files.get(file, 0.0) for file, took in self._seconds.items()}
        terminalreporter.write_line("The tier exceeds its budget by more than half. What grew most:", red=True)
        for file, more in sorted(grown.items(), key=lambda one: -one[1])[:15]:
            terminalreporter.write_line(f"  {more:+7.1f} s  {file}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    tier = config.getoption("tier")
    if tier not in BUDGETS or hasattr(config, "workerinput"):
        return
    is_whole = config.args in (["tests"], [f"tests/{tier}"]) and not config.option.keyword
    if is_whole and not config.option.collectonly:
        config.pluginmanager.register(Budget(config, tier))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    began = time.perf_counter()
    try:
        return (yield)
    finally:
        took, item = time.perf_counter() - began, request.config.stash.get(CURRENT, None)
        if took > LEAST and item is not None:
            item.user_properties.append((f"fixture {fixturedef.argname}", f"{took:.3f}"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.config.stash[CURRENT] = item
    return (yield)
