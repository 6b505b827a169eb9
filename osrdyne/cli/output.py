"""Print tables and JSON. Control characters in text of other programs are escaped."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

STANDBY = "This daemon does not lead its pool: `osrdyne status` names the leader."
_PIPE_WIDTH = 240


def print_json(value: Any) -> None:
    """Print indented JSON, in the order given."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    # Half of a surrogate pair cannot be printed as UTF-8; its escape is that of JSON.
    typer.echo(text.encode("utf-8", "backslashreplace").decode("utf-8"))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """Print a table, or the sentence `empty` if there are no rows. A column without a name has notes, which may be
    empty."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        cells = zip(columns, row, strict=True)
        table.add_row(*(Text(printable(cell) if column or cell != "" else "") for column, cell in cells))
    if table.row_count == 0:
        typer.echo(empty)
        return
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False).print(table)


def printable(value: object) -> str:
    """Text for a terminal: control characters escaped, None as a dash, the empty text in quotes."""
    if value is None:
        return "-"
    if value == "":
        return "''"
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "replace").decode()
        for character in str(value)
    )


def log_line(text: str) -> str:
    """A line of a log for a terminal: as `printable`, but with tabs."""
    return "\t".join(printable(part) if part else "" for part in text.split("\t"))


def start_parts(parts: Mapping[str, int]) -> str:
    """The parts of a start, given in milliseconds, as `jvm 2.5 s · session 2.3 s`."""
    return " · ".join(f"{printable(name)} {took / 1000:.1f} s" for name, took in parts.items())


def core_time(seconds: float | None) -> str:
    """The run time of tasks on one core, as `12.3 s`."""
    return "-" if seconds is None else f"{seconds:,.1f} s"


def ago(moment: float | None) -> str:
    """`3m ago`, for seconds since the epoch."""
    return "-" if moment is None else f"{span(time.time() - moment)} ago"


def ahead(moment: float | None) -> str:
    """`in 3m`, for seconds since the epoch."""
    return "" if moment is None else f"in {span(moment - time.time())}"


def span(seconds: float) -> str:
    """A length of time in its largest whole unit: `3m`."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def hours_and_minutes(seconds: float) -> str:
    """A length of time as plans and forecasts are read: `9 h 15 min`; below a minute `42 s`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
