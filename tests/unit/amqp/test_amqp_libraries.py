"""Only `osrdyne.amqp` uses the AMQP libraries, and only by their public names (decision 0042)."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import osrdyne.amqp

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "osrdyne" / "amqp"
LIBRARIES = {"aio_pika", "aiormq"}
MODULES = [importlib.import_module(f"osrdyne.amqp.{module.name}") for module in pkgutil.iter_modules([str(PACKAGE)])]


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
