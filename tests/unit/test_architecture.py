"""Rules of the design: names of modules, and who uses the AMQP libraries. `lint-imports` checks who imports whom."""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for tree in ("osrdyne", "workers") for path in (ROOT / tree).rglob("*.py"))
PACKAGE = ROOT / "osrdyne" / "amqp"


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_modules_have_a_docstring_and_a_subject():
    """A module opens with a docstring, and its name is that of a subject."""
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    opening = re.compile(r'"""[\w`].*?"""\n', re.DOTALL)  # ast.parse() of all files takes half a second
    assert [name_of(path) for path, text in texts.items() if text and not opening.match(text)] == []
    assert [name_of(path) for path in SOURCES if path.stem in {"utils", "helpers", "common"}] == []


def test_test_modules_have_names_of_their_own():
    """Test folders are not packages, so that two modules of one name cannot be collected together."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_only_the_package_imports_the_amqp_libraries_and_it_reads_no_private_names():
    """But the patches of pamqp, which say when each can go (decision 0042)."""
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    imports = re.compile(r"^\s*(?:from|import) (?:aio_pika|aiormq)\b", re.MULTILINE)
    assert {path.parent for path, text in texts.items() if imports.search(text)} == {PACKAGE}
    assert {path.parent for path, text in texts.items() if "aiormq" in text} == {PACKAGE}
    for path in PACKAGE.glob("*.py"):
        attributes = [node for node in ast.walk(ast.parse(texts[path])) if isinstance(node, ast.Attribute)]
        private = [node for node in attributes if re.match("_(?!_)", node.attr)]
        foreign = [ast.unparse(node) for node in private if ast.unparse(node.value) not in {"self", "cls"}]
        assert path.stem == "pamqp_patches" or foreign == []
