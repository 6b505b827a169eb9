"""The plugins of the tests, in a pytest of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parents[2] / "plugins"
LOADED = ("tiers", "durations", "reruns", "no_skips", "failures_at_once", "pytest_rerunfailures")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path):
    """Run the tests of a file with the plugins; `records` are the durations of files on the reference machine."""
    (tmp_path / "tests").mkdir()
    records = {"floor": 1000.0, "files": {"tests/test_grown.py": 0.0}}
    (tmp_path / "tests" / "durations.json").write_text(json.dumps(records))
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    nightly\n    timeout\n    rabbitmq4\n    one_rabbitmq\n"
    )

    def run(text, *arguments, **variables):
        (tmp_path / "tests" / "test_grown.py").write_text(text)
        # Options of this run are not meant for that one.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "OSRDYNE"))}
        mine = {"PYTHONPATH": str(PLUGINS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"}
        loaded = [word for name in LOADED for word in ("-p", name)]
        command = [sys.executable, "-m", "pytest", *loaded, "-p", "no:cacheprovider", *arguments, "tests"]
        return subprocess.run(
            command, env=inherited | mine | variables, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    return run


def passed(result: subprocess.CompletedProcess[str]) -> list[str]:
    lines = [line.split()[0] for line in result.stdout.splitlines() if line.endswith("PASSED") or " PASSED " in line]
    return sorted(line.rpartition("::")[2] for line in lines)


TIERS = """
import pytest

@pytest.fixture
def daemon(processes): pass

def test_pure(): pass
def test_daemon(daemon): pass
def test_spark(java): pass
def test_image(docker_engine): pass
def test_pods(kubernetes_api): pass

@pytest.mark.nightly
def test_long(java): pass
"""


@pytest.mark.parametrize(
    ("tier", "name"),
    [
        ("test", "test_pure"),
        ("process", "test_daemon"),
        ("spark", "test_spark"),
        ("docker", "test_image"),
        ("kubernetes", "test_pods"),
        ("nightly", "test_long"),
    ],
)
def test_tier_follows_from_the_fixtures(run, tier, name):
    assert passed(run(TIERS, "-v", "--tier", tier)) == [name]


def test_test_that_starts_a_process_without_the_fixture_fails(run):
    start = "import subprocess, sys\ndef test_it({}): subprocess.run([sys.executable, '-m', 'osrdyne_missing'])\n"
    result = run(start.format(""), "--tier", "test")
    assert result.returncode == 1
    assert "python:osrdyne_missing: it needs the fixture `processes`" in result.stdout.replace(
        Path(sys.executable).name, "python"
    )
    assert run(start.format("processes"), "--tier", "process").returncode == 0


def test_all_targets_share_one_budget_of_second_runs(run, tmp_path):
    names = tmp_path / "reruns.txt"
    flaky = """
import pytest
seen = set()

@pytest.mark.parametrize("number", range({count}))
def test_it(number, processes):
    if number not in seen:
        seen.add(number)
        raise AssertionError("the first time")
"""
    first = run(flaky.format(count=2), "--tier", "process", OSRDYNE_RERUNS=str(names))
    assert (first.returncode, len(names.read_text().splitlines())) == (0, 2), first.stdout
    second = run(flaky.format(count=2), "--tier", "process", OSRDYNE_RERUNS=str(names))
    assert (second.returncode, len(names.read_text().splitlines())) == (1, 4)
    assert "UNSTABLE: tests/test_grown.py::test_it[0]" in second.stdout


HIDDEN = """
import pytest

def test_fine(): pass

@pytest.mark.skip
def test_marked(): pass

def test_inside(): pytest.skip('no service')

@pytest.mark.xfail
def test_expected_to_fail(): assert False
"""


def test_run_with_hidden_tests_fails_and_names_them(run):
    result = run(HIDDEN)
    assert result.returncode == 1, result.stdout
    named = [line.split()[2] for line in result.stdout.splitlines() if line.startswith("NOT ALLOWED: ")]
    assert [name.rpartition("::")[2] for name in named] == ["test_expected_to_fail", "test_inside", "test_marked"]


KILLED = """
import os, signal

def test_1_fails():
    assert sorted([2, 1]) == [2, 1]

def test_2_ends_the_run():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_failure_is_printed_before_the_run_ends(run):
    result = run(KILLED)
    assert result.returncode < 0, "killed before its summary"
    assert "test_grown.py::test_1_fails: call failed after" in result.stdout
    assert "assert [1, 2] == [2, 1]" in result.stdout
