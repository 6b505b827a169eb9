"""The plugin that chooses the tests for another RabbitMQ, in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PLUGINS = Path(__file__).parents[1] / "plugins"
TESTS = """
import pytest

@pytest.fixture
def broker(): pass

@pytest.fixture
def own_broker(): pass

def test_without(): pass
def test_given(broker): pass
def test_own(broker, own_broker): pass

@pytest.mark.parametrize("kind", ["memory", "rabbitmq"])
def test_both(kind): pass
"""


def test_only_tests_of_the_given_rabbitmq_are_chosen(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(TESTS)
    arguments = ["-v", "-p", "another_rabbitmq", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", os.devnull]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(PLUGINS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    passed = {line.split(" ")[0].partition("::")[2] for line in result.stdout.splitlines() if " PASSED" in line}
    assert passed == {"test_given", "test_both[rabbitmq]"}, result.stdout
    assert "3 deselected" in result.stdout
