"""Text from outside cannot control the terminal, and times read well."""

from __future__ import annotations

import io
import json
import sys
import time

import pytest

from osrdyne.cli.output import ago, ahead, hours_and_minutes, log_line, print_json, print_table, printable, span


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


def test_log_line_keeps_tabs_only() -> None:
    assert log_line("a\tb\x1b[31m") == "a\tb\\x1b[31m"


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0s"), (59, "59s"), (60, "1m"), (7199, "1h"), (90000, "1d")])
def test_span_is_in_its_largest_unit(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(59.4, "59 s"), (60, "1 min"), (7199, "119 min"), (33_300, "9 h 15 min")]
)
def test_length_of_a_plan_is_in_hours_and_minutes(seconds: float, text: str) -> None:
    assert hours_and_minutes(seconds) == text


def test_json_with_half_of_a_surrogate_pair_is_printed_and_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="utf-8", errors="strict"))
    print_json({"path": "/\udcff", "text": "é\\"})
    sys.stdout.flush()
    assert json.loads(written.getvalue()) == {"path": "/\udcff", "text": "é\\"}


def test_moments_are_relative_to_now() -> None:
    now = time.time()
    assert (ago(now - 125), ahead(now + 125), ago(None), ahead(None)) == ("2m ago", "in 2m", "-", "")


def test_table_takes_markup_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("key",), [("[red]x[/red]",)], empty="")
    assert "[red]x[/red]" in capsys.readouterr().out


def test_empty_table_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("key",), [], empty="There are no groups.")
    assert capsys.readouterr().out == "There are no groups.\n"


def test_empty_text_is_quoted_but_in_a_column_of_notes(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("key", ""), [("", ""), ("a", "a note")], empty="nothing")
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == ["key"]
    assert lines[2:] == [["''"], ["a", "a", "note"]]
