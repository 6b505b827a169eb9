"""Renders the Helm chart of this project without Helm, which Debian does not have.

It knows the little of Go's templates that the chart keeps to, and refuses everything else, so that a template cannot
pass here and mean something else to Helm: `define`, `include`, `if` with `else`, `with`, fields, texts, whole numbers,
and pipelines of the functions below. Source: Go docs, text/template; Helm docs, template functions. Helm 3.16 renders
the same objects from this chart and these values (compared once, by hand).
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from tests.acceptance.daemon_process import merged

_TOKEN = re.compile(r"\{\{(-?)\s(.*?)\s(-?)\}\}", re.DOTALL)
_WORD = re.compile(r'"[^"\\]*"|[^\s"|]+|\|')

Part = str | list[str]
"""Text, or the words of an action."""


class Chart:
    """One chart directory."""

    def __init__(self, directory: Path) -> None:
        self.values: dict[str, Any] = yaml.safe_load((directory / "values.yaml").read_text())
        self.schema: dict[str, Any] = json.loads((directory / "values.schema.json").read_text())
        self._about = yaml.safe_load((directory / "Chart.yaml").read_text())
        self._files = {
            path.name: list(_split(path.read_text())) for path in sorted((directory / "templates").iterdir())
        }
        self._defined = {
            part[1].strip('"'): parts[at + 1 :]
            for parts in self._files.values()
            for at, part in enumerate(parts)
            if part[:1] == ["define"]
        }

    def render(self, *, release: str, namespace: str, **values: Any) -> list[dict[str, Any]]:
        """The objects that `helm template` would print."""
        dot = {
            "Values": merged(self.values, values),
            "Release": {"Name": release, "Namespace": namespace, "Service": "Helm"},
            "Chart": {"Name": self._about["name"], "AppVersion": str(self._about["appVersion"])},
        }
        texts = {name: self._run(iter(parts), dot, dot)[0] for name, parts in self._files.items()}
        documents = (yaml.safe_load_all(text) for name, text in texts.items() if name.endswith(".yaml"))
        return [document for found in documents for document in found if document]

    def _run(self, parts: Iterator[Part], dot: Any, root: Any) -> tuple[str, str]:
        """What the parts print up to their `else` or `end`, and which of them it was."""
        text = ""
        for part in parts:
            if isinstance(part, str):
                text += part
                continue
            head, *rest = part
            if head == "end" or part == ["else"]:
                return text, head
            if head == "define":
                _skip(parts)
            elif head in {"if", "with"}:
                value = self._pipeline(rest, dot, root)
                ended = "" if value else _skip(parts)
                if value or ended == "else":
                    printed, ended = self._run(parts, value if head == "with" and value else dot, root)
                    assert ended, "a block without an end"
                    text += printed
                    if value and ended == "else":
                        _skip(parts)
            elif not head.startswith("/*"):
                text += _text(self._pipeline(part, dot, root))
        return text, ""

    def _pipeline(self, words: list[str], dot: Any, root: Any) -> Any:
        value: Any = None
        commands = [list(command) for is_pipe, command in groupby(words, "|".__eq__) if not is_pipe]
        for number, command in enumerate(commands):
            value = self._command(command, dot, root, piped=[value] if number else [])
        return value

    def _command(self, words: list[str], dot: Any, root: Any, *, piped: list[Any]) -> Any:
        head, *rest = words
        if not rest and not piped and head not in _FUNCTIONS:
            return _operand(head, dot)
        arguments = [_operand(word, dot) for word in rest] + piped
        if head == "include":
            name, inner = arguments
            return self._run(iter(self._defined[name]), inner, root)[0]
        return _FUNCTIONS[head](*arguments)


def _skip(parts: Iterator[Part]) -> str:
    """Pass over a section; what ends it, `else` or `end`."""
    depth = 0
    for part in parts:
        if isinstance(part, list) and part[0] in {"if", "with", "define"}:
            depth += 1
        elif part == ["else"] and not depth:
            return "else"
        elif part == ["end"]:
            depth -= 1
            if depth < 0:
                return "end"
    raise AssertionError("a block without an end")


def _split(text: str) -> Iterator[Part]:
    """Text and actions; a dash in the braces eats the white space on its side."""
    at, eat = 0, False
    for found in _TOKEN.finditer(text):
        before = text[at : found.start()].lstrip() if eat else text[at : found.start()]
        yield before.rstrip() if found[1] else before
        yield _WORD.findall(found[2])
        at, eat = found.end(), bool(found[3])
    yield text[at:].lstrip() if eat else text[at:]
    assert "{{" not in _TOKEN.sub("", text), "an action that cannot be read"


def _operand(word: str, dot: Any) -> Any:
    if word.startswith('"'):
        return word[1:-1]
    if word.isdecimal():
        return int(word)
    assert word.startswith("."), f"{word} is nothing this renderer knows"
    value = dot
    for name in filter(None, word.split(".")):
        value = value[name]  # a KeyError is a value that values.yaml does not have
    return value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    assert isinstance(value, str | int), f"{value!r} would be printed in Go's way"
    return str(value)


def _to_yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=True, default_flow_style=False, allow_unicode=True).rstrip("\n")


def _nindent(spaces: int, text: str) -> str:
    return "\n" + "\n".join(" " * spaces + line if line else line for line in text.split("\n"))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "include": lambda: None,
    "toYaml": _to_yaml,
    "nindent": _nindent,
    "quote": lambda text: json.dumps(str(text), ensure_ascii=False),
    "default": lambda fallback, value: value or fallback,
    "sha256sum": lambda text: hashlib.sha256(text.encode()).hexdigest(),
}
