"""`osrdyne poison …`: the requests that failed too often, as a running daemon shows them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from osrdyne.cli.options import ApiOption, ConfigOption, Output, OutputOption, remote
from osrdyne.cli.output import ago, log_line, print_json, print_table, printable
from osrdyne.errors import OsrdyneError

app = typer.Typer(help="Look at requests that failed too often.", no_args_is_help=True)


@app.command("list")
def list_poison(
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="How many messages.")] = 100,
    api: ApiOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the poison inventory, oldest first."""
    messages = remote(api, config).get("/v1/poison", limit=limit)["messages"]
    if output is Output.JSON:
        print_json(messages)
        return
    columns = ("position", "key", "path", "reason", "deliveries", "bytes", "last failure")
    print_table(columns, [_row(message) for message in messages], empty="The poison inventory is empty.")


@app.command()
def show(
    position: Annotated[int, typer.Argument(min=0, max=999, help="The position that `poison list` shows.")],
    api: ApiOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show one message of the poison inventory with its headers and body."""
    messages = remote(api, config).get("/v1/poison", limit=position + 1)["messages"]
    message = next((message for message in messages if message["position"] == position), None)
    if message is None:
        raise OsrdyneError(f"There is no message at position {position}: `osrdyne poison list` shows what there is.")
    if output is Output.JSON:
        print_json(message)
        return
    for name in ("key", "path", "reason", "correlation_id", "deliveries", "size_bytes"):
        typer.echo(f"{name:15} {printable(message[name])}")
    typer.echo(f"{'first failure':15} {ago(message['first_at'])}")
    typer.echo(f"{'last failure':15} {ago(message['last_at'])}")
    print_table(("header", "value"), message["headers"].items(), empty="It has no headers.")
    typer.echo(f"body ({message['body_encoding']}):")
    for line in message["body"].splitlines():
        typer.echo(log_line(line))


def _row(message: dict[str, Any]) -> tuple[object, ...]:
    return (
        message["position"],
        message["key"],
        message["path"],
        message["reason"],
        message["deliveries"],
        message["size_bytes"],
        ago(message["last_at"]),
    )
