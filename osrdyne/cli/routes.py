"""`osrdyne routes …`: the routes of managed pools and their conditions. Thin."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TextIO

import typer

from osrdyne.cli.call import parse_header
from osrdyne.errors import ConfigurationError
from osrdyne.ingress.conditions import compile_condition
from osrdyne.ingress.conditions.batch import evaluate_line, sample_of, shown
from osrdyne.protocol.messages import JSON_TYPE

app = typer.Typer(help="Try the conditions of routes.", no_args_is_help=True)

_JSON_SYSTEM = {"contentType": JSON_TYPE, "contentEncoding": "utf-8"}


@app.command("eval")
def evaluate(
    subject: Annotated[
        str | None, typer.Argument(metavar="[CONDITION|FILE]", help="A condition; with --batch a file, - by default.")
    ] = None,
    headers: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header; may be repeated.")
    ] = None,
    system: Annotated[
        list[str] | None,
        typer.Option("--system", "-S", metavar="NAME=VALUE", help="A system property; may be repeated."),
    ] = None,
    data: Annotated[str | None, typer.Option("--data", "-d", metavar="JSON", help="The body, as JSON.")] = None,
    batch: Annotated[
        bool, typer.Option("--batch", help='Read JSON lines: {"condition", "properties", "system", "body"}.')
    ] = False,
) -> None:
    """Say what a condition makes of a request: true, false or undefined. A route is taken only on true."""
    if batch:
        if headers or system or data is not None:
            raise typer.BadParameter("each line has its own headers, system properties and body.", param_hint="--batch")
        _evaluate_lines(subject or "-")
        return
    if subject is None:
        raise typer.BadParameter("name a condition, such as \"level = '3'\", or say --batch.", param_hint="CONDITION")
    properties = dict(map(parse_header, headers or ()))
    own_system = dict(map(parse_header, system or ()))
    condition = compile_condition(subject)
    result = shown(condition.evaluate(sample_of(properties, (_JSON_SYSTEM if data else {}) | own_system, data)))
    typer.echo(json.dumps(result).strip('"'))


def _evaluate_lines(file: str) -> None:
    with _opened(file) as lines:
        for line in lines:
            if line.strip():
                typer.echo(json.dumps(evaluate_line(line), ensure_ascii=False))


@contextmanager
def _opened(file: str) -> Iterator[TextIO]:
    if file == "-":
        yield sys.stdin
        return
    try:
        with Path(file).open(encoding="utf-8", errors="replace") as opened:
            yield opened
    except OSError as error:
        raise ConfigurationError(f"Cannot read {file}: {error.strerror}.") from error
