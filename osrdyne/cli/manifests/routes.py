"""`osrdyne routes …`: the routes of a managed pool and their conditions."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from osrdyne.cli.manifests.commands import ManifestCommands, opened
from osrdyne.cli.options import parse_header
from osrdyne.cli.output import print_table
from osrdyne.ingress.acceptance import TtlLimits, warn_of_capped_ttls
from osrdyne.ingress.conditions import compile_condition
from osrdyne.ingress.conditions.batch import evaluate_line, sample_of, shown
from osrdyne.ingress.routes.manifest import Manifest, load_manifest
from osrdyne.ingress.routes.route import Route
from osrdyne.pool.routing.manifest_store import ManifestKind
from osrdyne.protocol.messages import JSON_TYPE

app = typer.Typer(
    help="Manage the routes of a managed pool: priority, destination and time-to-live of its requests.",
    no_args_is_help=True,
)

_JSON_SYSTEM = {"contentType": JSON_TYPE, "contentEncoding": "utf-8"}


def print_routes(manifest: Manifest) -> None:
    rows = (
        (
            route.name,
            "default" if route.priority is None else route.priority,
            _ttl(route, manifest),
            _retry(route),
            "yes" if route.coalesce else "no",
            route.text,
        )
        for route in sorted(manifest.routes, key=lambda route: route.rank)
    )
    print_table(
        ("route", "priority", "ttl", "retry", "coalesce", "text"),
        rows,
        empty="The manifest has no route: every request is answered no-route.",
    )


def _ttl(route: Route, manifest: Manifest) -> str:
    """The TTL of a route as a phrase; the pool's `requests.max_ttl` limits it, and `requests.ttl` is the default."""
    seconds = route.ttl or manifest.ttl or 0
    return f"{seconds}s" if seconds > 0 else "the pool's longest" if seconds < 0 else "the pool's"


def _retry(route: Route) -> str:
    """The codes and the number of attempts of a retry."""
    return "no" if route.retry is None else f"{' '.join(route.retry.codes)}, {route.retry.max_attempts} times"


commands = ManifestCommands(
    ManifestKind.ROUTES,
    load=load_manifest,
    print_meaning=print_routes,
    warnings=lambda manifest, settings: warn_of_capped_ttls(
        manifest, TtlLimits(settings.requests.ttl, settings.requests.longest_ttl)
    ),
    none="every request goes to $upstream at the default priority level.",
    size="routes",
)
commands.add_to(app)


@app.command("eval")
def evaluate(
    subject: Annotated[
        str | None,
        typer.Argument(metavar="[CONDITION|FILE]", help="Condition; with --batch a file (default: standard input)."),
    ] = None,
    headers: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="NAME=VALUE", help="Header as name=value; repeatable.")
    ] = None,
    system: Annotated[
        list[str] | None,
        typer.Option("--system", "-S", metavar="NAME=VALUE", help="System property as name=value; repeatable."),
    ] = None,
    data: Annotated[str | None, typer.Option("--data", "-d", metavar="JSON", help="Request body as JSON.")] = None,
    batch: Annotated[
        bool, typer.Option("--batch", help='Read JSON lines: {"condition", "properties", "system", "body"}.')
    ] = False,
) -> None:
    """Evaluate a condition for a request: true, false or undefined. A route matches only if it is true."""
    if batch:
        if headers or system or data is not None:
            raise typer.BadParameter(
                "in a batch, each line has its own headers, system properties and body.", param_hint="--batch"
            )
        _evaluate_lines(subject or "-")
        return
    if subject is None:
        raise typer.BadParameter("name a condition, such as \"level = '3'\", or give --batch.", param_hint="CONDITION")
    properties = dict(map(parse_header, headers or ()))
    own_system = dict(parse_header(text, option="--system") for text in system or ())
    condition = compile_condition(subject)
    result = shown(condition.evaluate(sample_of(properties, (_JSON_SYSTEM if data else {}) | own_system, data)))
    typer.echo(json.dumps(result).strip('"'))


def _evaluate_lines(file: str) -> None:
    with opened(file) as lines:
        for line in lines:
            if line.strip():
                typer.echo(json.dumps(evaluate_line(line), ensure_ascii=False))
