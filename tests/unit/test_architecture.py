"""Rules of the design: names of modules, and who uses the AMQP libraries. `lint-imports` checks who imports whom."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import osrdyne.amqp

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for tree in ("osrdyne", "workers") for path in (ROOT / tree).rglob("*.py"))
PACKAGE = ROOT / "osrdyne" / "amqp"
LIBRARIES = {"aio_pika", "aiormq"}
MODULES = [importlib.import_module(f"osrdyne.amqp.{module.name}") for module in pkgutil.iter_modules([str(PACKAGE)])]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_modules_have_a_docstring_and_a_subject() -> None:
    """A module opens with a docstring, and its name is that of a subject."""
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    opening = re.compile(r'"""[\w`].*?"""\n', re.DOTALL)  # ast.parse() of all files takes half a second
    assert [name_of(path) for path, text in texts.items() if text and not opening.match(text)] == []
    assert [name_of(path) for path in SOURCES if path.stem in {"utils", "helpers", "common"}] == []


def test_test_modules_have_names_of_their_own() -> None:
    """Test folders are not packages, so that two modules of one name cannot be collected together."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_only_the_package_imports_the_libraries() -> None:
    texts = {file: file.read_text() for folder in ("osrdyne", "workers") for file in (ROOT / folder).rglob("*.py")}
    naming = {file: text for file, text in texts.items() if any(library in text for library in LIBRARIES)}
    users = {
        file.parent
        for file, text in naming.items()
        if LIBRARIES & {name.partition(".")[0] for name in imported(ast.parse(text))}
    }
    assert users == {PACKAGE}
    assert {file.parent for file, text in naming.items() if "aiormq" in text} == {PACKAGE}
    assert set(osrdyne.amqp.LOG_LEVELS) == LIBRARIES


def private_attributes(tree: ast.AST) -> list[ast.Attribute]:
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return [node for node in attributes if node.attr.startswith("_") and not node.attr.endswith("__")]


def subclasses_of_the_libraries() -> Iterator[type]:
    for module in MODULES:
        for _, found in inspect.getmembers(module, inspect.isclass):
            if found.__module__.startswith(osrdyne.amqp.__name__) and any(
                base.__module__.partition(".")[0] in LIBRARIES for base in found.__mro__
            ):
                yield found


def test_subclass_reads_and_overrides_no_private_name_of_its_base() -> None:
    """`self._name` in a subclass is one that the subclass itself defines or assigns."""
    subclasses = set(subclasses_of_the_libraries())
    assert len(subclasses) >= 3
    for found in subclasses:
        used = private_attributes(ast.parse(inspect.getsource(found).lstrip()))
        own = {node.attr for node in used if isinstance(node.ctx, ast.Store)} | set(vars(found))
        assert {node.attr for node in used} - own == set(), found
        bases = [base for base in found.__mro__[1:] if base.__module__.partition(".")[0] in LIBRARIES]
        private = {name for name in vars(found) if name.startswith("_") and not name.endswith("__")} - {"_abc_impl"}
        assert {name for base in bases for name in private & set(vars(base))} == set(), found
