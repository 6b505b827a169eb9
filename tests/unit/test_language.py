"""Words that are kept out of sources, documentation and help texts: name the component, and use the standard term."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import typer

from osrdyne.cli.main import full_command_line

ROOT = Path(__file__).parents[2]
FOLDERS = ("osrdyne", "workers", "tests", "tools", "deploy", "docs", ".ci", ".github", ".devcontainer")
WORDS = ("nobody", "somebody", "whoever", "told", "wish", "dear", "befall", "for ever", "all the same")
FOUND = re.compile(
    "|".join(word.replace(" ", "[ _-]+") for word in WORDS).join((r"(?<![a-z])(?:", r")(?![a-z])")), re.I
)
"""Whole words; an underscore separates words too, so names are read as well. A line end counts as a blank."""


def files() -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.suffix in {".md", ".toml", ".yml"})
    yield ROOT / "Makefile"
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path != Path(__file__):
                yield path


def words_of(text: str) -> list[str]:
    """The words in it, with a little of what is around each."""
    joined = re.sub(r"\s*\n[\s#*/]*", " ", text)
    return [joined[max(0, found.start() - 30) : found.end() + 30] for found in FOUND.finditer(joined)]


def read(path: Path) -> str:
    """The text of a file; empty when it is binary."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def help_texts(group: typer.core.TyperGroup) -> Iterator[str]:
    for command in group.commands.values():
        yield command.help or ""
        yield from (getattr(parameter, "help", None) or "" for parameter in command.params)
        if isinstance(command, typer.core.TyperGroup):
            yield from help_texts(command)


def test_words_are_found_in_any_case_in_names_and_over_line_ends() -> None:
    assert len(words_of("Nobody is test_told; for\n    # ever")) == 3
    assert words_of("foretold, wishes, for everything") == []


def test_words_are_in_no_file() -> None:
    found = {path.relative_to(ROOT).as_posix(): words_of(read(path)) for path in files()}
    assert len(found) > 500
    assert {name: words for name, words in found.items() if words} == {}


def test_words_are_in_no_help_text() -> None:
    command = typer.main.get_command(full_command_line())
    assert isinstance(command, typer.core.TyperGroup)
    texts = list(help_texts(command))
    assert len(texts) > 40
    assert [text for text in texts if words_of(text)] == []
