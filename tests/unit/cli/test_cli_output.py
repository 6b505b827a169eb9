"""Text from outside cannot control the terminal, and times read well."""

from __future__ import annotations

import io
import json
import sys

import pytest

from osrdyne.cli.output import log_line, print_json, print_table, printable


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("é漢🚄", "é漢🚄"),
        ("a\nb\x1b[2J", r"a\nb\x1b[2J"),
        ("\u202e", r"\u202e"),
        ("\udcff", r"\udcff"),
        ("", "''"),
        (None, "-"),
        (0, "0"),
    ],
)
def test_printable_escapes_what_controls_a_terminal(value: object, shown: str) -> None:
    assert printable(value) == shown
    assert log_line("a\tb\x1b[31m") == "a\tb\\x1b[31m"


def test_json_with_half_of_a_surrogate_pair_is_printed_and_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="utf-8", errors="strict"))
    print_json({"path": "/\udcff", "text": "é\\"})
    sys.stdout.flush()
    assert json.loads(written.getvalue()) == {"path": "/\udcff", "text": "é\\"}


def test_table_takes_markup_as_text_and_quotes_empty_text_but_in_a_column_of_notes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(("key", ""), [("", ""), ("[red]x[/red]", "a note")], empty="nothing")
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == ["key"]
    assert lines[2:] == [["''"], ["[red]x[/red]", "a", "note"]]
    print_table(("key",), [], empty="nothing")
    assert capsys.readouterr().out == "nothing\n"
