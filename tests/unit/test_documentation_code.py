"""Code blocks of README and docs: Python ones are Python, and those after `<!-- runs -->` run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^(?P<mark><!-- runs -->\n)?```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


def blocks() -> Iterator[tuple[str, bool, str]]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            line = text[: found.start("code")].count("\n") + 1
            yield f"{page.relative_to(ROOT).as_posix()}:{line}", found["mark"] is not None, found["code"]


def test_python_of_the_documentation_is_python() -> None:
    for where, runs, code in blocks():
        compiled = compile(code, where, "exec", dont_inherit=True)
        if runs:
            exec(compiled, {"__name__": "documentation"})


def test_some_code_of_the_documentation_runs() -> None:
    assert any(runs for _, runs, _ in blocks())
