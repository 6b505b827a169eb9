"""The plugin that prints each failure when it happens, in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PLUGINS = Path(__file__).parents[2] / "plugins"
INNER = """
import os, signal

def test_1_fails():
    assert sorted([2, 1]) == [2, 1]

def test_2_ends_the_run():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_failure_is_printed_before_the_run_ends(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(INNER)
    arguments = ["-p", "failures_at_once", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", os.devnull]
    # Options of this run are not meant for that one.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    environment = {**inherited, "PYTHONPATH": str(PLUGINS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment["PYTHONUNBUFFERED"] = "1"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, str(tmp_path)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode < 0, "killed before its summary"
    assert "test_inner.py::test_1_fails: call failed after" in result.stdout
    assert "assert [1, 2] == [2, 1]" in result.stdout
