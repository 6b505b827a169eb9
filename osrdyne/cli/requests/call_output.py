"""The output of `osrdyne call`: progress while it waits, then the answer or the error."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from osrdyne.cli.output import log_line, print_json, printable
from osrdyne.client import Reply, RequestError, StartFailedError
from osrdyne.logs import mask_uri
from osrdyne.protocol.messages import ARROW_TYPE
from osrdyne.protocol.progress import JobProgress, StartProgress

_PIPE_WIDTH = 10_000  # Columns of a table that is not printed on a terminal, so that nothing is folded.
_NUMBERS = ("int", "long", "short", "byte", "float", "double", "decimal", "real")


class CallOutput(StrEnum):
    """The output format. `table`: a table for rows, indented JSON otherwise. `json`: the body. `arrow`: an Arrow stream
    for another program."""

    TABLE = "table"
    JSON = "json"
    ARROW = "arrow"


class ProgressDisplay:
    """Progress on standard error: a live line on a terminal, one line per message elsewhere, and only if wanted."""

    def __init__(self, *, wanted: bool | None, terminal: bool) -> None:
        self.is_shown = terminal if wanted is None else wanted
        self._lines = self.is_shown and not terminal
        self._live = (
            Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            if self.is_shown and terminal
            else None
        )
        self._task = None if self._live is None else self._live.add_task("connecting", total=None)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def waiting(self, path: str, key: str) -> None:
        """Show that the request is being sent."""
        self._update(printable(f"{path} for {key}"), None, None)

    def show(self, reply: Reply) -> None:
        """Show a progress message or a partial answer."""
        text, done, total = progress_of(reply)
        if self._lines:
            typer.echo(text, err=True)
        self._update(text, done, total)

    def starting(self, progress: StartProgress) -> None:
        """Show that the key's worker is starting, or waits for its start."""
        text = printable(progress)
        if self._lines:
            typer.echo(text, err=True)
        self._update(text, None, None)

    def jobs(self, progress: JobProgress) -> None:
        """Show how far Spark's jobs are."""
        text = printable(progress)
        if self._lines:
            typer.echo(text, err=True)
        self._update(text, progress.tasks_done, progress.tasks_total)

    def _update(self, text: str, done: float | None, total: float | None) -> None:
        if self._live is not None and self._task is not None:
            self._live.update(self._task, description=text, completed=done, total=total)


def progress_of(reply: Reply) -> tuple[str, float | None, float | None]:
    """The text of a progress message, how much is done, and the total. Reads `step` and `of`, or `done` and `total`,
    and `message`."""
    try:
        value = json.loads(reply.body)
    except (ValueError, RecursionError):
        return printable(reply.text), None, None
    if not isinstance(value, dict):
        return printable(value), None, None
    done, total = (_number(value.get(short), value.get(long)) for short, long in (("step", "done"), ("of", "total")))
    message = value.get("message")
    if message is None:
        message = f"{done:g} of {total:g}" if done is not None and total is not None else reply.text
    return printable(message), done, total


def _number(*values: object) -> float | None:
    numbers = (float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool))
    return next(numbers, None)


def print_answer(reply: Reply, output: CallOutput) -> None:
    if output is CallOutput.ARROW:
        _print_arrow(reply)
    elif output is CallOutput.JSON or not reply.body:
        _write(reply.body, end=b"\n" if reply.body else b"")
    else:
        _print_readable(reply)


def write_part(part: bytes) -> None:
    """Write a part of a streamed answer."""
    _write(part)


def _print_arrow(reply: Reply) -> None:
    if reply.content_type != ARROW_TYPE:
        typer.echo(
            f"The answer is {reply.content_type or 'of no stated type'}: this path does not return Arrow.", err=True
        )
        raise typer.Exit(1)
    _write(reply.body)


def _print_readable(reply: Reply) -> None:
    try:
        value = json.loads(reply.body)
    except (ValueError, RecursionError):
        _write(reply.body, end=b"\n")
        return
    if not is_table(value):
        print_json(value)
        return
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    Console(file=sys.stdout, width=width, highlight=False).print(to_table(value))
    count = len(value["rows"])
    more = "; there are more, the limit of rows is reached" if value.get("truncated") else ""
    typer.echo(f"{count} {'row' if count == 1 else 'rows'}{more}", err=True)


def is_table(value: Any) -> bool:
    """Whether an answer has the shape `{"columns": [{"name", "type"}], "rows": [[…]]}`."""
    if not isinstance(value, dict) or not isinstance(value.get("columns"), list):
        return False
    columns, rows = value["columns"], value.get("rows")
    return (
        all(isinstance(column, dict) and isinstance(column.get("name"), str) for column in columns)
        and isinstance(rows, list)
        and all(isinstance(row, list) and len(row) == len(columns) for row in rows)
    )


def to_table(value: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in value["columns"]:
        is_number = str(column.get("type", "")).startswith(_NUMBERS)
        table.add_column(Text(printable(column["name"])), justify="right" if is_number else "left", overflow="fold")
    for row in value["rows"]:
        table.add_row(*(_cell(cell) for cell in row))
    return table


def _cell(value: object) -> Text:
    if value is None:
        return Text("NULL", style="dim")
    if isinstance(value, bool | dict | list):
        return Text(printable(json.dumps(value, ensure_ascii=False)))
    # Line breaks as lines: the answer of EXPLAIN is one text.
    lines = str(value).split("\n")
    return Text("\n".join(printable(line) if line else "" for line in lines))


def print_error(error: BaseException) -> None:
    """Print the error in a sentence, then the detail of the answer, the last log lines of a worker, and the code."""
    for line in error_lines(error):
        typer.echo(line, err=True)


def error_lines(error: BaseException) -> list[str]:
    if isinstance(error, KeyboardInterrupt):
        return ["Interrupted. If the request was sent, a cancellation was sent as well."]
    lines = [log_line(mask_uri(str(error)))]
    if not isinstance(error, RequestError):
        return lines
    log = error.log_lines if isinstance(error, StartFailedError) else ()
    detail = (error.detail or "").splitlines()
    if not log and detail:
        lines += [log_line(line) for line in detail if line not in str(error)]
    if log:
        lines += ["The last lines of its log:", *(f"  {log_line(line)}" for line in log)]
    if error.code is not None:
        tried = f", after {error.attempts} attempts" if error.attempts != 1 else ""
        lines.append(f"Code {error.code}{tried}.")
    if error.retry_after is not None:
        lines.append(f"Try again in {error.retry_after:g} s.")
    return lines


def _write(body: bytes, *, end: bytes = b"") -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(body + (end if not body.endswith(end) else b""))
    sys.stdout.buffer.flush()
