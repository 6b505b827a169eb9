"""All texts of errors in one place: each is a sentence that a user can read. Other tests check classes and fields."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("osrdyne", "workers") for path in sorted((ROOT / folder).rglob("*.py"))]
SECRET = re.compile(r"^(?:.*[._])?(?:password|secret|token|uri|credentials)(?:[._].*)?$", re.IGNORECASE)
SHOWN = re.compile(r"mask|shown|describe|hide|name|path|file|user|host|reason|kind|label|type|len|option")
"""Functions and names that take a secret out of a text, or whose value is none."""


OF_PYTHON = {"ValueError", "TypeError", "RuntimeError", "NotImplementedError", "AssertionError", "KeyError"}


def texts() -> Iterator[tuple[str, str, list[ast.expr]]]:
    """The place, the text and the values of each error that the product raises; values are `…` in the text."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call) or not node.exc.args:
                continue
            name, first = node.exc.func, node.exc.args[0]
            if not isinstance(name, ast.Name) or not name.id.endswith("Error") or name.id[0].islower():
                continue
            if name.id in OF_PYTHON:
                continue
            place = f"{path.relative_to(ROOT)}:{node.lineno}"
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield place, first.value, []
            elif isinstance(first, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in first.values]
                values = [part.value for part in first.values if isinstance(part, ast.FormattedValue)]
                yield place, "".join(map(str, parts)), values


WORDS = re.compile(r"\b(?:nobody|somebody|whoever|told|wish|dear|oops|sorry|please)\b", re.IGNORECASE)


def test_texts_are_sentences():
    """A text that begins with a capital ends as a sentence; others name a place, or are a part of a sentence."""
    found = list(texts())
    assert len(found) > 300
    unfinished = [(place, text) for place, text, _ in found if text[:1].isupper() and text[-1] not in ".…!?:)\n"]
    assert unfinished == []
    assert [(place, text) for place, text, _ in found if "  " in text or WORDS.search(text)] == []


def test_texts_show_no_secret():
    wrong = []
    for place, _, values in texts():
        for value in values:
            shown = ast.unparse(value)
            if SECRET.match(shown) and not SHOWN.search(shown) and not shown.isupper():
                wrong.append(f"{place}: {shown}")
    assert wrong == []
