"""`osrdyne routes …`: the routes of managed pools and their conditions. Thin."""

from __future__ import annotations

import getpass
import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import unified_diff
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from osrdyne.cli.call import parse_header
from osrdyne.cli.options import ApiOption, ConfigOption, Output, OutputOption, remote
from osrdyne.cli.output import ago, print_json, print_table, printable
from osrdyne.client.daemon_api import DaemonApi
from osrdyne.errors import ConfigurationError
from osrdyne.ingress.conditions import compile_condition
from osrdyne.ingress.conditions.batch import evaluate_line, sample_of, shown
from osrdyne.ingress.manifest import Manifest, load_manifest
from osrdyne.ingress.routes import Route
from osrdyne.protocol.messages import JSON_TYPE

app = typer.Typer(help="Which requests of a managed pool go first, where to, and for how long.", no_args_is_help=True)

AuthorOption = Annotated[
    str | None, typer.Option("--author", metavar="NAME", help="Kept with the version; else user@host.")
]

_JSON_SYSTEM = {"contentType": JSON_TYPE, "contentEncoding": "utf-8"}


@app.command()
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A route manifest, JSON or YAML; - is standard input.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Check a route manifest: every error with its place, or what its routes mean."""
    manifest = read_manifest(file)
    for warning in manifest.warnings:
        typer.echo(f"warning: {printable(warning)}", err=True)
    if output is Output.JSON:
        print_json(manifest.document())
        return
    print_routes(manifest)


@app.command()
def show(api: ApiOption = None, config: ConfigOption = None, output: OutputOption = Output.TABLE) -> None:
    """Show the routes in force. With --output json a manifest that `apply` takes."""
    current = _current(remote(api, config))
    if output is Output.JSON:
        print_json(current["manifest"] if current else None)
    elif current is None:
        typer.echo("There has never been a manifest: everything goes to $upstream in the default class.")
    else:
        typer.echo(f"version {current['version']}, by {printable(current['author'])}, {ago(current['at'])}")
        print_routes(load_manifest(json.dumps(current["manifest"])))


@app.command()
def apply(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A route manifest, JSON or YAML; - is standard input.")],
    author: AuthorOption = None,
    api: ApiOption = None,
    config: ConfigOption = None,
) -> None:
    """Put a manifest in force, at once and for requests to come. Those that wait keep their priority and deadline."""
    document = read_manifest(file).document()
    _told(remote(api, config).send("PUT", "/v1/routes", document, author=author or _own_name()))


@app.command()
def diff(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A route manifest, JSON or YAML; - is standard input.")],
    api: ApiOption = None,
    config: ConfigOption = None,
) -> None:
    """Show what `apply` would change. Exit code 1 when there is a difference."""
    current = _current(remote(api, config))
    before, after = (current["manifest"] if current else {}), read_manifest(file).document()
    lines = list(unified_diff(_lines(before), _lines(after), "in force", file, lineterm=""))
    typer.echo("\n".join(lines) if lines else "No difference.")
    if lines:
        raise typer.Exit(1)


@app.command()
def history(api: ApiOption = None, config: ConfigOption = None, output: OutputOption = Output.TABLE) -> None:
    """List the versions of the manifest that are kept, the newest first."""
    versions = remote(api, config).get("/v1/routes/history")["versions"]
    if output is Output.JSON:
        print_json(versions)
        return
    rows = ((one["version"], one["author"], ago(one["at"]), len(one["manifest"].get("routes", {}))) for one in versions)
    print_table(("version", "author", "applied", "routes"), rows, empty="There has never been a manifest.")


@app.command()
def rollback(
    version: Annotated[int, typer.Argument(metavar="VERSION", help="A version that `history` shows.")],
    author: AuthorOption = None,
    api: ApiOption = None,
    config: ConfigOption = None,
) -> None:
    """Put an earlier version in force again, as a new version."""
    _told(remote(api, config).post("/v1/routes/rollback", version=version, author=author or _own_name()))


def _lines(document: Any) -> list[str]:
    return json.dumps(document, indent=2, ensure_ascii=False).splitlines()


def _current(daemon: DaemonApi) -> Any:
    return daemon.get("/v1/routes")["current"]


def _told(change: Any) -> None:
    for warning in change["warnings"]:
        typer.echo(f"warning: {printable(warning)}", err=True)
    typer.echo(f"Version {change['version']} is in force.")
    for word, name in (("new", "added_priorities"), ("no longer used", "removed_priorities")):
        if change[name]:
            typer.echo(f"Priorities {word}: {', '.join(map(str, change[name]))}.")


def _own_name() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"


def read_manifest(file: str) -> Manifest:
    """Raises `InvalidDocumentError`, a `ConfigurationError` that lists all errors."""
    with _opened(file) as opened:
        return load_manifest(opened.read())


def print_routes(manifest: Manifest) -> None:
    rows = (
        (route.name, "default" if route.priority is None else route.priority, _ttl(route, manifest), route.text)
        for route in sorted(manifest.routes, key=lambda route: route.rank)
    )
    print_table(
        ("route", "priority", "ttl", "text"),
        rows,
        empty="The manifest has no route: every request is answered no-route.",
    )


def _ttl(route: Route, manifest: Manifest) -> str:
    """What the manifest says; the pool's own `requests.ttl` is a limit to all of it."""
    seconds = route.ttl or manifest.ttl or 0
    return f"{seconds}s" if seconds > 0 else "none" if seconds < 0 else "the pool's"


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
