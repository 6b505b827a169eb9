"""`osrdyne explain KEY PATH`: what a managed pool would do with a request, step by step. Sends nothing. Thin."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from osrdyne.cli.call import parse_header, read_body, seconds
from osrdyne.cli.options import ConfigOption, KeyArgument, Output, OutputOption, SetOption, load
from osrdyne.cli.output import print_json, printable
from osrdyne.cli.routes import read_manifest
from osrdyne.ingress.explain import Explanation
from osrdyne.ingress.explain import explain as explained
from osrdyne.ingress.requests import sample_arrival
from osrdyne.ingress.table import RouteTable
from osrdyne.protocol.names import PoolNames


def explain(
    key: KeyArgument,
    path: Annotated[str, typer.Argument(metavar="PATH", help="Which handler of the worker, such as /sql.")],
    routes: Annotated[str, typer.Option("--routes", metavar="FILE", help="The route manifest, JSON or YAML.")],
    headers: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header; may be repeated.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", "-d", metavar="JSON|@FILE|-", help="The body; - reads standard input.")
    ] = None,
    app_id: Annotated[str | None, typer.Option("--app-id", metavar="NAME", help="The publisher's name.")] = None,
    timeout: Annotated[str | None, typer.Option(metavar="DURATION", help="The caller's own limit, as 30s.")] = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say which routes a request takes, and its group, queue, priority and deadline."""
    settings = load(config, assignments).settings
    arrival = sample_arrival(
        key,
        path,
        headers=dict(map(parse_header, headers or ())),
        body=read_body(data),
        app_id=app_id,
        timeout=None if timeout is None else seconds(timeout),
        now=time.time(),
    )
    table = RouteTable(read_manifest(routes))
    print_explanation(
        explained(arrival, table, names=PoolNames(settings.pool.id), pool_ttl=settings.requests.ttl), output
    )


def print_explanation(explanation: Explanation, output: Output) -> None:
    if output is Output.JSON:
        print_json(explanation.to_json())
        return
    for step in explanation.steps:
        typer.echo(f"{step.name:9} {printable(step.text)}")
