"""Pages of the documentation: code, links, tests and names in them are right, and all are in the navigation."""

import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote

import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
SUITES = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "osrdyne" / "testing").rglob("*.py")]


def test_every_page_is_in_the_navigation():
    """But decisions, which have an index of their own, and pages for contributors."""
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    listed = re.findall(r"[\w/-]+\.md", str(navigation))
    assert len(listed) == len(set(listed))
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    apart = [page for page in pages if page.startswith(("decisions/", "dev/")) and not page.endswith("index.md")]
    assert sorted([*listed, *apart]) == sorted(pages)
    index = (DOCS / "decisions" / "index.md").read_text(encoding="utf-8")
    assert [path for path in (DOCS / "decisions").glob("0*.md") if f"({path.name})" not in index] == []


LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)")
FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def test_every_link_to_a_file_leads_somewhere_and_each_page_begins_with_its_title():
    for page in PAGES:
        text = FENCED.sub("", page.read_text(encoding="utf-8"))
        assert [found.start() for found in re.finditer(r"^# .+", text, re.MULTILINE)] == [0], page
        targets = [unquote(link.split("#")[0]) for link in LINK.findall(text) if "://" not in link]
        assert [target for target in targets if target and not (page.parent / target).exists()] == [], page


def test_every_page_that_a_source_names_exists():
    """Comments, messages and example configurations name pages by their path; `*` stands for several."""
    missing = set()
    for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0"):
        path = ROOT / name
        if name.startswith("docs/") or not path.is_file():
            continue
        named = re.findall(r"\bdocs/[\w./*-]*[\w*]", path.read_text(encoding="utf-8", errors="ignore"))
        missing |= {f"{name}: {page}" for page in named if not any(ROOT.glob(page))}
    assert missing == set()


BLOCK = re.compile(r"^(?P<mark><!-- runs -->\n)?```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


def test_python_of_the_documentation_is_python():
    """And runs, where it is marked so."""
    marks = set()
    for page in PAGES:
        for found in BLOCK.finditer(page.read_text(encoding="utf-8")):
            compiled = compile(found["code"], page, "exec", dont_inherit=True)
            marks.add(found["mark"])
            if found["mark"]:
                exec(compiled, {"__name__": "documentation"})
    assert len(marks) == 2, "some run"


def test_failure_modes_are_proven_as_their_pages_say():
    checked = subprocess.run([ROOT / "tools" / "failure_modes", "--check"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_two_failure_modes_with_one_anchor_are_found(tmp_path):
    for name in ("tests", "tools"):
        (tmp_path / name).mkdir()
    (tmp_path / "tests" / "test_x.py").write_text('@pytest.mark.proves("page/same")\ndef test_x():\n')
    (page := tmp_path / "docs" / "reference" / "failure-modes" / "page.md").parent.mkdir(parents=True)
    page.write_text(2 * '| <a id="same"></a>What breaks | `test_x` |\n')
    tool = shutil.copy(ROOT / "tools" / "failure_modes", tmp_path / "tools")
    checked = subprocess.run([tool, "--check"], capture_output=True, text=True, check=False)
    assert (checked.returncode, "page/same" in checked.stdout) == (1, True)


def test_tests_that_pages_name_exist():
    existing = {name for path in SUITES for name in re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8"))}
    pages = [path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"`(test_\w+)`", page)}
    assert len(named) > 200
    assert named - existing == set()
