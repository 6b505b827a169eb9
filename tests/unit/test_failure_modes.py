"""The failure modes in the documentation: a test proves each row, and every test that a page names exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUITES = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "osrdyne" / "testing").rglob("*.py")]


def test_failure_modes_are_proven_as_their_pages_say() -> None:
    checked = subprocess.run([ROOT / "tools" / "failure_modes", "--check"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_tests_that_pages_name_exist() -> None:
    existing = {name for path in SUITES for name in re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8"))}
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"`(test_\w+)`", page)}
    assert len(named) > 200
    assert named - existing == set()
