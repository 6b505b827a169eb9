"""The failure modes in the documentation: each one names a test, and the tests that it names are there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGES = sorted((TESTS.parent / "docs" / "reference" / "failure-modes").glob("*.md"))
SOURCES = "".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
TABLES = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
ROWS = [line for line in TABLES if not line.endswith("Proven by |")]


def test_every_failure_mode_has_its_row() -> None:
    assert len(ROWS) > 120


def test_failure_modes_are_proven_by_tests_that_exist() -> None:
    named = {row: re.findall(r"`(test_\w+)`", row) for row in ROWS}
    assert [row for row, names in named.items() if not names] == []
    assert [name for names in named.values() for name in names if f"def {name}(" not in SOURCES] == []
