"""The failure modes in the documentation: each row names tests, and every test that a page names exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
PAGES = sorted((DOCS / "reference" / "failure-modes").glob("*.md"))
SUITES = {path: set(re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8"))) for path in TESTS.rglob("*.py")}
TABLES = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
ROWS = [line for line in TABLES if not line.endswith("Proven by |")]


def test_every_failure_mode_has_its_row() -> None:
    assert len(ROWS) > 120


def test_failure_modes_are_proven_by_tests_that_exist() -> None:
    named = {row: re.findall(r"`(test_\w+)`", row) for row in ROWS}
    assert [row for row, names in named.items() if not names] == []
    existing = set().union(*(names for path, names in SUITES.items() if path.name.startswith("test_")))
    assert {name for names in named.values() for name in names} - existing == set()


def test_tests_that_other_pages_name_exist() -> None:
    """Pages about security and drivers name the tests of their promises; they may stand in shared suites, too."""
    named = {
        name for path in DOCS.rglob("*.md") for name in re.findall(r"`(test_\w+)`", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 200
    assert named - set().union(*SUITES.values()) == set()
