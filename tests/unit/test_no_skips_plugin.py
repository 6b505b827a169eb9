"""The plugin that makes a skipped test a failed run, in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parents[1] / "plugins"


def run_pytest(directory: Path, test: str) -> subprocess.CompletedProcess[str]:
    (directory / "test_inner.py").write_text(f"import pytest\n\n{test}\n")
    arguments = ["-p", "no_skips", "-p", "no:cacheprovider", "--rootdir", str(directory), "-c", os.devnull]
    environment = {**os.environ, "PYTHONPATH": str(PLUGINS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, str(directory)],
        env=environment, cwd=directory, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "test",
    [
        "@pytest.mark.skip\ndef test_it(): pass",
        "def test_it(): pytest.skip('no service')",
        "pytest.skip('no service', allow_module_level=True)",
        "@pytest.mark.xfail\ndef test_it(): assert False",
    ],
    ids=["marked", "inside", "module", "expected to fail"],
)
def test_run_with_a_hidden_test_fails_and_names_it(tmp_path: Path, test: str) -> None:
    result = run_pytest(tmp_path, f"def test_fine(): pass\n\n{test}")
    assert result.returncode != 0, result.stdout
    assert "NOT ALLOWED: test_inner.py" in result.stdout


def test_run_without_hidden_tests_is_green(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, "def test_fine(): pass")
    assert result.returncode == 0, result.stdout
    assert "NOT ALLOWED" not in result.stdout
