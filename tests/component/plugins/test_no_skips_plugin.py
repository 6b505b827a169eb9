"""The plugin that makes a skipped test a failed run, in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PLUGINS = Path(__file__).parents[2] / "plugins"
HIDDEN = """
import pytest

def test_fine(): pass

@pytest.mark.skip
def test_marked(): pass

def test_inside(): pytest.skip('no service')

@pytest.mark.xfail
def test_expected_to_fail(): assert False
"""


def test_run_with_hidden_tests_fails_and_names_them(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(HIDDEN)
    (tmp_path / "test_module.py").write_text("import pytest\npytest.skip('no service', allow_module_level=True)")
    arguments = ["-p", "no_skips", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", os.devnull]
    # Options of this run are not meant for that one.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    environment = {**inherited, "PYTHONPATH": str(PLUGINS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, str(tmp_path)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 1, result.stdout
    named = [line for line in result.stdout.splitlines() if line.startswith("NOT ALLOWED: ")]
    assert [line.split()[2] for line in named] == [
        "test_inner.py::test_expected_to_fail",
        "test_inner.py::test_inside",
        "test_inner.py::test_marked",
        "test_module.py",
    ]
