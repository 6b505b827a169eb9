"""`osrdyne audit`: times of its options, pages, and cells of its CSV."""

import time
from datetime import UTC, datetime
from typing import Any

import pytest
from typer.testing import CliRunner

from osrdyne.auth.audit import AuditQuery, AuditRecord, page_of, parse_cursor
from osrdyne.cli.access import audit as command
from osrdyne.cli.main import command_line
from osrdyne.errors import ConfigurationError

MOMENT = datetime(2026, 11, 22, 10, tzinfo=UTC).timestamp()


class Daemon:
    """Answers as the API does, and notes what it was asked."""

    def __init__(self, number: int, target: str = "a") -> None:
        common = {"principal": "alice", "method": "token", "role": "admin", "action": "groups.stop", "target": target}
        self.records = [
            AuditRecord(request_id=f"{one:032x}", at_ms=int(MOMENT * 1000) + one, **common) for one in range(number)
        ]
        self.asked: list[dict[str, Any]] = []

    def get(self, path: str, /, *, before: str | None, limit: int, **filters: object) -> dict[str, Any]:
        assert path == "/v1/audit"
        self.asked.append({"limit": limit, **filters})
        page = page_of(self.records, AuditQuery(limit=limit, before=None if before is None else parse_cursor(before)))
        names = [name for name in command.FIELDS if name != "at"]
        entries = [{"at": one.at_ms / 1000, **{name: getattr(one, name) for name in names}} for one in page.records]
        return {"entries": entries, "next": page.following}


def run(monkeypatch: pytest.MonkeyPatch, daemon: Daemon, *arguments: str) -> str:
    monkeypatch.setattr(command, "remote", lambda *_: daemon)
    result = CliRunner().invoke(command_line("audit"), ["audit", *arguments])
    if isinstance(result.exception, ConfigurationError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_time_of_an_option_is_a_date_or_an_age(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: MOMENT)
    daemon = Daemon(1)
    same = ("2026-11-22T10:00:00Z", "2026-11-22T10:00", "2026-11-22T11:00:00+01:00", "2026-11-22 10:00:00", "0h")
    for text in (*same, "2h"):
        run(monkeypatch, daemon, "--since", text)
    assert [asked["since"] for asked in daemon.asked] == [MOMENT] * 5 + [MOMENT - 7200]
    for other in ("soon", "", "2026-13-01", "5 parsecs"):
        with pytest.raises(ConfigurationError, match="--since"):
            run(monkeypatch, daemon, "--since", other)


def test_pages_are_read_up_to_the_limit(monkeypatch):
    daemon = Daemon(2_500)
    lines = run(monkeypatch, daemon, "--limit", "2100", "--who", "alice", "-o", "csv").splitlines()
    assert [asked["limit"] for asked in daemon.asked] == [1_000, 1_000, 100]
    assert {asked["principal"] for asked in daemon.asked} == {"alice"}
    assert len(lines) == len(set(lines)) == 2_101


def test_csv_holds_no_formula_and_no_control_character(monkeypatch):
    cells = {text: f"'{text}" for text in ("=1+1", "+1", "-1", "@x", " =1")}
    cells |= {"\t=1": "\\t=1", "a\x1b[2Jb": "a\\x1b[2Jb", "a\nb\u202ec\x9b": "a\\nb\\u202ec\\x9b"}
    for text, cell in cells.items():
        assert f",{cell}," in run(monkeypatch, Daemon(1, text), "-o", "csv")
