"""Renders the Helm chart of this project without Helm, which Debian does not have.

It knows the little of Go's templates that the chart keeps to, and refuses everything else, so that a template cannot
pass here and mean something else to Helm: `define`, `include`, `if` with `else`, `with`, fields, texts, whole numbers,
and pipelines of the functions below. Source: Go docs, text/template; Helm docs, template functions. Helm 3.16 renders
the same objects from this chart and these values (compared once, by hand).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_TOKEN = re.compile(r"\{\{(-?)\s(.*?)\s(-?)\}\}", re.DOTALL)
_WORD = re.compile(r'"[^"\\]*"|[^\s"|]+|\|')


@dataclass
class Block:
    """`if` and `with`: what is done when the pipeline is something, and when it is nothing."""

    kind: str
    words: list[str]
    parts: list[Any] = field(default_factory=list)
    otherwise: list[Any] | None = None


@dataclass(frozen=True)
class Pipeline:
    words: list[str]


class Chart:
    """One chart directory."""

    def __init__(self, directory: Path) -> None:
        self.values: dict[str, Any] = yaml.safe_load((directory / "values.yaml").read_text())
        self.schema: dict[str, Any] = json.loads((directory / "values.schema.json").read_text())
        self._about = yaml.safe_load((directory / "Chart.yaml").read_text())
        self._defined: dict[str, list[Any]] = {}
        self._files: dict[str, list[Any]] = {}
        for path in sorted((directory / "templates").iterdir()):
            self._files[path.name] = self._parse(path.read_text())

    def render(self, *, release: str, namespace: str, **values: Any) -> list[dict[str, Any]]:
        """The objects that `helm template` would print."""
        dot = {
            "Values": merged(self.values, values),
            "Release": {"Name": release, "Namespace": namespace, "Service": "Helm"},
            "Chart": {"Name": self._about["name"], "AppVersion": str(self._about["appVersion"])},
        }
        texts = {name: self._run(parts, dot, dot) for name, parts in self._files.items()}
        documents = (yaml.safe_load_all(text) for name, text in texts.items() if name.endswith(".yaml"))
        return [document for found in documents for document in found if document]

    # --- reading

    def _parse(self, text: str) -> list[Any]:
        top: list[Any] = []
        open_blocks: list[Block] = []
        for part in _split(text):
            target = _innermost(open_blocks, top)
            if isinstance(part, str):
                target.append(part)
                continue
            head, *rest = part.words
            if head in {"if", "with", "define"}:
                open_blocks.append(Block(head, rest))
            elif head == "else" and not rest and open_blocks[-1].otherwise is None:
                open_blocks[-1].otherwise = []
            elif head == "end" and not rest:
                block = open_blocks.pop()
                if block.kind == "define":
                    self._defined[block.words[0].strip('"')] = block.parts
                else:
                    _innermost(open_blocks, top).append(block)
            elif not head.startswith("/*"):
                target.append(part)
        assert not open_blocks, "a block without an end"
        return top

    # --- running

    def _run(self, parts: list[Any], dot: Any, root: Any) -> str:
        return "".join(self._run_part(part, dot, root) for part in parts)

    def _run_part(self, part: Any, dot: Any, root: Any) -> str:
        if isinstance(part, str):
            return part
        value = self._pipeline(part.words, dot, root)
        if isinstance(part, Pipeline):
            return _text(value)
        if value:
            return self._run(part.parts, value if part.kind == "with" else dot, root)
        return self._run(part.otherwise or [], dot, root)

    def _pipeline(self, words: list[str], dot: Any, root: Any) -> Any:
        value: Any = None
        for number, command in enumerate(_commands(words)):
            value = self._command(command, dot, root, piped=[value] if number else [])
        return value

    def _command(self, words: list[str], dot: Any, root: Any, *, piped: list[Any]) -> Any:
        head, *rest = words
        if not rest and not piped and head not in _FUNCTIONS:
            return _operand(head, dot)
        arguments = [_operand(word, dot) for word in rest] + piped
        if head == "include":
            name, inner = arguments
            return self._run(self._defined[name], inner, root)
        return _FUNCTIONS[head](*arguments)


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Values over values: maps are merged, everything else is replaced."""
    result = dict(base)
    for name, value in changes.items():
        known = result.get(name)
        result[name] = merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return result


def _split(text: str) -> Iterator[str | Pipeline]:
    """Text and actions; a dash in the braces eats the white space on its side."""
    at, eat = 0, False
    for found in _TOKEN.finditer(text):
        before = text[at : found.start()]
        yield _eaten(before, left=eat, right=bool(found[1]))
        yield Pipeline(_WORD.findall(found[2]))
        at, eat = found.end(), bool(found[3])
    yield _eaten(text[at:], left=eat, right=False)
    assert "{{" not in _TOKEN.sub("", text), "an action that cannot be read"


def _eaten(text: str, *, left: bool, right: bool) -> str:
    text = text.lstrip() if left else text
    return text.rstrip() if right else text


def _innermost(blocks: list[Block], top: list[Any]) -> list[Any]:
    if not blocks:
        return top
    block = blocks[-1]
    return block.parts if block.otherwise is None else block.otherwise


def _commands(words: list[str]) -> Iterator[list[str]]:
    command: list[str] = []
    for word in words:
        if word == "|":
            yield command
            command = []
        else:
            command.append(word)
    yield command


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
