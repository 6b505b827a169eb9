"""The rules of the design that a machine can check: who imports whom, and how modules are named and introduced."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for tree in ("osrdyne", "workers") for path in (ROOT / tree).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_imports_go_downwards_only() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    environment = {**os.environ, "COLUMNS": "200"}
    result = subprocess.run(
        [str(linter), "--no-cache"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_module_has_a_docstring_and_a_subject(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not text or ast.get_docstring(ast.parse(text)), "a module opens with a docstring: what it owns, who calls it"
    assert path.stem not in {"utils", "helpers", "common"}, "name the subject"


def test_test_modules_have_names_of_their_own() -> None:
    """Test folders are no packages, so that two modules of one name cannot be collected together."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
