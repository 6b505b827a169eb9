"""The pages of the documentation: none too long to read in one sitting, and every one in the navigation."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
MAX_WORDS = 1500
LONG = {
    "design/broker-measurements.md",  # a table of measurements, to look figures up
    "reference/configuration/settings.md",  # generated from the models, to look settings up
    "reference/glossary.md",  # a table of terms, to look them up
}
PARTS = {"tutorials", "how-to", "reference", "explanation", "design", "decisions"}


def words(page: str) -> int:
    """Words of text, tables and code; the bars of tables do not count."""
    return sum(1 for word in (DOCS / page).read_text(encoding="utf-8").split() if re.search(r"\w", word))


def pages_of(entry: Any) -> list[str]:
    match entry:
        case str():
            return [entry]
        case list():
            return [page for item in entry for page in pages_of(item)]
        case dict():
            return [page for item in entry.values() for page in pages_of(item)]
    raise TypeError(entry)


def test_pages_are_short_enough_to_read() -> None:
    """A page that is too long is split by subject."""
    assert {page: words(page) for page in PAGES if page not in LONG and words(page) > MAX_WORDS} == {}


def test_pages_that_may_be_long_exist() -> None:
    assert set(PAGES) >= LONG


def test_every_page_belongs_to_a_part() -> None:
    assert {page.split("/")[0] for page in PAGES} == PARTS | {"index.md"}


def test_every_page_is_in_the_navigation() -> None:
    """Decisions have an index of their own."""
    listed = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert len(listed) == len(set(listed))
    assert sorted(listed) == [page for page in PAGES if not page.startswith("decisions/") or page.endswith("index.md")]


READING_SETS = {
    "The life of an orphan": 15,
    "A route priority": 15,
    "A retry": 12,
    "The stop of an idle group": 12,
    "A driver": 6,
}
"""The largest number of files that a newcomer reads for a story."""


def test_stories_of_the_code_name_files_and_stay_short() -> None:
    """`Where to read` names files that exist, and no more of them than the limit of each story."""
    page = (DOCS / "explanation" / "architecture.md").read_text(encoding="utf-8")
    stories = page.split("## Where to read")[1].split("\n## ")[0].split("\n\n**")[1:]
    files = {story.split("**")[0]: re.findall(r"`([\w/]+\.py)`", story) for story in stories}
    missing = [
        path
        for paths in files.values()
        for path in paths
        if not (ROOT / ("workers" if path.startswith("osrdyne_worker") else "osrdyne") / path).is_file()
    ]
    assert missing == []
    assert {story: len(set(paths)) <= READING_SETS[story] for story, paths in files.items()} == dict.fromkeys(
        READING_SETS, True
    )


def test_every_decision_is_in_the_index() -> None:
    index = (DOCS / "decisions" / "index.md").read_text(encoding="utf-8")
    decisions = [path.name for path in (DOCS / "decisions").glob("0*.md")]
    assert [name for name in decisions if f"({name})" not in index] == []


def test_pages_are_rendered_as_they_are_meant() -> None:
    """The site renders neither code blocks in lists nor lists that are nested by less than four spaces."""
    wrong = {}
    for page in PAGES:
        text = (DOCS / page).read_text(encoding="utf-8")
        outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        lines = re.findall(r"^ +```.*", text, re.MULTILINE)
        lines += re.findall(r"^ {1,3}(?:[-*+]|\d+\.) .*", outside, re.MULTILINE)
        if lines:
            wrong[page] = lines
    assert wrong == {}


def test_variants_that_the_design_names_exist() -> None:
    """[`nosettle`] beside a step names the row of the model that leaves the step out."""
    known = {
        run["name"] for run in tomllib.loads((ROOT / "tests" / "model" / "variants.toml").read_text("utf-8"))["run"]
    }
    text = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "design").glob("lifecycle*.md"))
    named = {
        name for found in re.findall(r"\[(`\w+`(?:,\s+`\w+`)*)\](?!\()", text) for name in re.findall(r"\w+", found)
    }
    assert len(named) > 20
    assert named <= known, named - known


def test_steps_that_the_model_names_exist() -> None:
    """A row of the model ends with the steps that it shows, in brackets."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "design").glob("lifecycle*.md"))
    steps = set(re.findall(r"^### ([a-z-]+)$", text, re.MULTILINE))
    rows = tomllib.loads((ROOT / "tests" / "model" / "variants.toml").read_text("utf-8"))["run"]
    named = {
        name for row in rows for found in re.findall(r"\(([a-z, -]+)\)$", row["shows"]) for name in found.split(", ")
    }
    assert len(named) > 15
    assert named <= steps, named - steps


def test_modules_that_pages_name_exist() -> None:
    """Decisions keep the names of their day, and the reference has labels such as `osrdyne.key`: both are left out."""
    named = {
        name
        for part in ("tutorials", "how-to", "explanation")
        for path in (DOCS / part).glob("*.md")
        for name in re.findall(r"`(osrdyne(?:_worker)?(?:\.\w+)+)`", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 20
    assert [name for name in sorted(named - {"osrdyne.slice"}) if not is_code(name)] == []


def is_code(name: str) -> bool:
    """Whether this is a module, or a name in one."""
    for module, attribute in ((name, None), tuple(name.rsplit(".", 1))):
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        return attribute is None or hasattr(found, attribute)
    return False
