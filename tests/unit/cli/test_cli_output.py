"""Values of options that several commands share, and output that cannot control the terminal."""

import io
import json
import sys

import pytest
import typer

from osrdyne.cli.options import parse_header, positive_seconds, read_body
from osrdyne.cli.output import log_line, print_json, print_table, printable


def test_printable_escapes_what_controls_a_terminal():
    shown = {"é漢🚄": "é漢🚄", "a\nb\x1b[2J": r"a\nb\x1b[2J", "\u202e": r"\u202e", "\udcff": r"\udcff", "": "''"}
    assert {value: printable(value) for value in shown} == shown
    assert (printable(None), printable(0), log_line("a\tb\x1b[31m")) == ("-", "0", "a\tb\\x1b[31m")


def test_json_with_half_of_a_surrogate_pair_is_printed_and_can_be_read(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="utf-8", errors="strict"))
    print_json({"path": "/\udcff", "text": "é\\"})
    sys.stdout.flush()
    assert json.loads(written.getvalue()) == {"path": "/\udcff", "text": "é\\"}


def test_table_takes_markup_as_text_and_quotes_empty_text(capsys):
    print_table(("key", ""), [("", ""), ("[red]x[/red]", "a note")], empty="nothing")
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == ["key"]
    assert lines[2:] == [["''"], ["[red]x[/red]", "a", "note"]]
    print_table(("key",), [], empty="nothing")
    assert capsys.readouterr().out == "nothing\n"


def test_body_comes_from_the_argument_a_file_or_standard_input(tmp_path, monkeypatch):
    file = tmp_path / "body.json"
    file.write_bytes(b"")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"[2]")))
    assert [read_body(data) for data in ("{}", f"@{file}", "-", None, "")] == [b"{}", b"", b"[2]", None, b""]
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"):
        file.write_bytes('{"a": "ä"}'.encode(encoding))
        assert read_body(f"@{file}") == '{"a": "ä"}'.encode()  # without a byte order mark
    for wrong in ("{", "select 1", "@/does/not/exist", "\udcff"):
        with pytest.raises(typer.BadParameter, match=r"JSON|cannot read"):
            read_body(wrong)


def test_header_is_name_and_value_and_no_token_and_an_invalid_duration_is_wrong_usage():
    assert parse_header("a=b=c") == ("a", "b=c")
    with pytest.raises(typer.BadParameter, match="name=value"):
        parse_header("a")
    with pytest.raises(typer.BadParameter, match="--token-file") as error:
        parse_header("Authorization=Bearer secret")
    assert "secret" not in str(error.value)
    for text in ("soon", "0s", "-1", ""):
        with pytest.raises(typer.BadParameter) as error:
            positive_seconds(text, option="--expires")
        assert error.value.param_hint == "--expires"
