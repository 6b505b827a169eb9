"""Links of the Markdown files, also those the documentation site does not check: README, changelog, and back."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)")
FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    targets = [unquote(link.split("#")[0]) for link in LINK.findall(text) if "://" not in link]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page_has_one_title_and_it_comes_first(page: Path) -> None:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^# .+", text, re.MULTILINE)
    assert len(titles) == 1
    assert text.startswith(titles[0])
