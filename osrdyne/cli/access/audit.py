"""`osrdyne audit`: the changes made through the API."""

from __future__ import annotations

import csv
import io
import time
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter

from osrdyne.cli.options import ApiOption, ConfigOption, remote
from osrdyne.cli.output import print_json, print_table, printable
from osrdyne.config.types import Duration
from osrdyne.errors import ConfigurationError

PAGE = 1_000
FIELDS = (
    "at", "principal", "role", "grant", "method", "address", "action", "target", "author", "outcome", "status",
    "digest_before", "digest_after", "request_id",
)  # fmt: skip


class AuditOutput(StrEnum):
    """Output format."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


_MOMENT = "an age such as 2h, or a time such as 2026-11-22T10:00:00+01:00 (UTC without an offset)"


def audit(
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help=f"Only later changes; {_MOMENT}.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", metavar="TIME", help="Only earlier changes.")] = None,
    who: Annotated[str | None, typer.Option("--who", metavar="NAME", help="Only changes of this principal.")] = None,
    action: Annotated[
        str | None, typer.Option("--action", metavar="NAME", help="Only this action, e.g. routes or groups.stop.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of changes.")] = 100,
    api: ApiOption = None,
    config: ConfigOption = None,
    output: Annotated[AuditOutput, typer.Option("--output", "-o", help="Output format.")] = AuditOutput.TABLE,
) -> None:
    """List the changes made through the API, newest first."""
    filters = {
        "since": _moment(since, option="--since"),
        "until": _moment(until, option="--until"),
        "principal": who,
        "action": action,
    }
    found = _entries(remote(api, config), filters, limit)
    match output:
        case AuditOutput.JSON:
            print_json([{**one, "at": _shown(one["at"])} for one in found])
        case AuditOutput.CSV:
            typer.echo(_csv(found), nl=False)
        case AuditOutput.TABLE:
            columns = ("at", "who", "role", "from", "action", "target", "outcome")
            print_table(columns, map(_row, found), empty="No change is recorded.")


def _entries(daemon: Any, filters: dict[str, Any], limit: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    before = None
    while True:
        page = daemon.get("/v1/audit", before=before, limit=min(PAGE, limit - len(found)), **filters)
        found += page["entries"]
        before = page["next"]
        if before is None or len(found) >= limit:
            return found


def _moment(text: str | None, *, option: str) -> float | None:
    """Seconds since the epoch, of an age or of a date and time."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        try:
            return max(0.0, time.time() - TypeAdapter(Duration).validate_python(text))
        except ValueError:
            raise ConfigurationError(f"{option}: {text!r} is not a time. Give {_MOMENT}.") from None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


def _shown(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def _row(entry: dict[str, Any]) -> tuple[object, ...]:
    outcome = entry["outcome"] if entry["status"] is None else f"{entry['outcome']} ({entry['status']})"
    at = datetime.fromtimestamp(entry["at"], UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    role = entry["role"] or entry["grant"]
    return at, entry["principal"], role, entry["address"], entry["action"], entry["target"], outcome


def _csv(entries: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(FIELDS)
    for entry in entries:
        writer.writerow([_cell(value) for value in ({**entry, "at": _shown(entry["at"])}[name] for name in FIELDS)])
    return text.getvalue()


def _cell(value: object) -> str:
    """A cell as text: control characters escaped, which a terminal would obey, and no formula for a spreadsheet."""
    text = "" if value in (None, "") else printable(value)
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) else text
