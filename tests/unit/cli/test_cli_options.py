"""Values of options that several commands share."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import typer

from osrdyne.cli.options import parse_header, positive_seconds, read_body


def test_body_comes_from_the_argument_a_file_or_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "body.json"
    file.write_bytes(b'{"a": 1}')
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"[2]")))
    assert [read_body(data) for data in ("{}", f"@{file}", "-", None)] == [b"{}", b'{"a": 1}', b"[2]", None]


@pytest.mark.parametrize("data", ["{", "select 1", "@/does/not/exist", ""])
def test_body_that_cannot_be_read_is_wrong_usage(data: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"JSON|cannot read"):
        read_body(data)


@pytest.mark.parametrize("text", ["soon", "0s", "-1", ""])
def test_invalid_duration_is_wrong_usage(text: str) -> None:
    with pytest.raises(typer.BadParameter) as error:
        positive_seconds(text, option="--expires")
    assert error.value.param_hint == "--expires"


def test_header_is_name_and_value_and_no_token() -> None:
    assert parse_header("a=b=c") == ("a", "b=c")
    with pytest.raises(typer.BadParameter, match="name=value"):
        parse_header("a")
    with pytest.raises(typer.BadParameter, match="--token-file") as error:
        parse_header("Authorization=Bearer secret")
    assert "secret" not in str(error.value)
