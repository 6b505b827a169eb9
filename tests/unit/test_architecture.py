"""The rules of the design that a machine can check: who imports whom, and how long things get."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for tree in ("osrdyne", "workers") for path in (ROOT / tree).rglob("*.py"))
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60

LONG_MODULES_ALLOWED: dict[str, str] = {}
"""Module, from the root of the project: why it is longer than the rest."""
LONG_FUNCTIONS_ALLOWED: dict[str, str] = {}
"""`module:function`: why it is longer than the rest."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Each function of a module with its number of lines, docstring included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{name_of(path)}:{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


def test_imports_go_downwards_only() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    environment = {**os.environ, "COLUMNS": "200"}
    result = subprocess.run(
        [str(linter), "--no-cache"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_module_is_short_and_says_what_it_is_for(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not text or ast.get_docstring(ast.parse(text)), "a module opens with a docstring: what it owns, who calls it"
    assert len(text.splitlines()) <= MAX_MODULE_LINES or name_of(path) in LONG_MODULES_ALLOWED
    assert path.stem not in {"utils", "helpers", "common"}, "name the subject"


def test_functions_are_short() -> None:
    long = {name: lines for path in SOURCES for name, lines in functions(path) if lines > MAX_FUNCTION_LINES}
    assert set(long) == set(LONG_FUNCTIONS_ALLOWED), long


def test_allowed_exceptions_are_still_needed() -> None:
    long = {name_of(path) for path in SOURCES if len(path.read_text(encoding="utf-8").splitlines()) > MAX_MODULE_LINES}
    assert set(LONG_MODULES_ALLOWED) <= long


def test_test_modules_have_names_of_their_own() -> None:
    """Test folders are no packages, so that two modules of one name cannot be collected together."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
