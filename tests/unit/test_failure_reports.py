"""What the report of a failed test shows beside the failure, in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from log_tails import LINES, log_tails

TESTS = Path(__file__).parents[1]
TEST = """
from osrdyne.logs import get_logger

def test_it(tmp_path):
    get_logger("inner").debug("something small", key="k")
    (tmp_path / "daemon-0").mkdir()
    (tmp_path / "daemon-0" / "daemon.log").write_text("the last word")
    assert False
"""


def test_failed_test_shows_events_and_the_ends_of_log_files(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(TEST)
    arguments = ["-p", "conftest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", os.devnull]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, "--basetemp", str(tmp_path / "own"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "something small" in result.stdout and "key=k" in result.stdout, result.stdout + result.stderr
    assert "end of daemon-0/daemon.log" in result.stdout and "the last word" in result.stdout


def test_long_log_is_shown_from_its_end_and_other_files_are_not(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("".join(f"{number}\n" for number in range(1000)))
    (tmp_path / "b.txt").write_text("no log")
    (tmp_path / "empty.log").touch()
    ((name, tail),) = log_tails(tmp_path)
    assert (name, tail.splitlines()[-1], len(tail.splitlines())) == ("a.log", "999", LINES)
