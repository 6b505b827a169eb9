"""Links of the Markdown files, also those the documentation site does not check: README, changelog, and back."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)")
FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def test_every_link_to_a_file_leads_somewhere() -> None:
    for page in PAGES:
        text = FENCED.sub("", page.read_text(encoding="utf-8"))
        targets = [unquote(link.split("#")[0]) for link in LINK.findall(text) if "://" not in link]
        assert [target for target in targets if target and not (page.parent / target).exists()] == [], page


def test_page_has_one_title_and_it_comes_first() -> None:
    for page in PAGES:
        text = FENCED.sub("", page.read_text(encoding="utf-8"))
        titles = re.findall(r"^# .+", text, re.MULTILINE)
        assert len(titles) == 1, page
        assert text.startswith(titles[0]), page


def test_every_page_that_a_source_names_exists() -> None:
    """Comments, messages and example configurations name pages by their path; `*` stands for several."""
    missing = set()
    for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0"):
        path = ROOT / name
        if name.startswith("docs/") or not path.is_file():
            continue
        named = re.findall(r"\bdocs/[\w./*-]*[\w*]", path.read_text(encoding="utf-8", errors="ignore"))
        missing |= {f"{name}: {page}" for page in named if not any(ROOT.glob(page))}
    assert missing == set()
