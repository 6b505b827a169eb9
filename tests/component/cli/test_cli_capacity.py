"""`osrdyne capacity`: what it prints, its exit codes, and wrong files and options."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from osrdyne.cli.main import execute


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_load_that_fits_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["capacity", "--rate", "277/min", "--events", "2.5", "--store", "store-s1"], debug=False) == 0
    assert "99.7 %" in (printed := capsys.readouterr().out)
    assert printed.endswith("The load fits.\n")


def test_a_load_that_does_not_fit_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["capacity", "--rate", "720/min", "--store", "store-s1"], debug=False) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^ *meter +demand +limit +utilisation +used up +excess *$", printed, re.MULTILINE)
    assert "after 9 h 15 min" in printed
    assert "Cheapest that holds: 3 × iot-hub-s1 and 1 × store-s1, 225 a month." in printed


def test_a_profile_and_prices_come_from_files(capsys: pytest.CaptureFixture[str]) -> None:
    Path("osrdyne.yaml").write_text("prices: {iot_hub_s1: 1, store_s1: 2}", encoding="utf-8")
    Path("load.yaml").write_text("load: [{duration: 30m, rate: 4320/min}]\nstore: store-s1\n", encoding="utf-8")
    assert execute(["capacity", "--profile", "load.yaml", "-o", "json"], debug=False) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["queue"]["drained"], found["cheapest"]["price"]) == (180 * 60, 1 + 6 * 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--rate, --profile and --from-history"),
        (["--rate", "7/week"], "--rate: '7/week' is not a rate"),
        (["--profile", "unit.yaml", "--units", "0"], "unit.yaml: load.0.rate: '7/week' is not a rate"),
        (["--profile", "unit.yaml", "--units", "0"], "--units: must be at least 1"),
        (["--rate", "7/min", "--hub", "s9"], "--hub: "),
        (["--profile", "none.yaml"], "Cannot read none.yaml"),
        (["--profile", "bad.json"], "bad.json: this is not JSON"),
        (["--profile", "list.yaml"], "list.yaml: a mapping"),
    ],
    ids=["nothing", "unit", "unit in a file", "units", "tier", "no file", "no JSON", "no mapping"],
)
def test_wrong_use_ends_with_2_and_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.json").write_text("{", encoding="utf-8")
    Path("list.yaml").write_text("[1]", encoding="utf-8")
    Path("unit.yaml").write_text("load: [{rate: 7/week}]", encoding="utf-8")
    assert execute(["capacity", *arguments], debug=False) == 2
    assert words in capsys.readouterr().err
