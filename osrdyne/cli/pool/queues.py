"""`osrdyne queues …`: the queues of keys, with a policy and a lifetime of their own."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from urllib.parse import parse_qs, urlsplit

import typer

from osrdyne.cli.manifests.commands import AuthorOption, opened, own_name
from osrdyne.cli.options import ApiOption, ConfigOption, KeyArgument, Output, OutputOption, remote
from osrdyne.cli.output import ahead, print_json, print_table, printable
from osrdyne.config.types import parse_duration
from osrdyne.errors import ConfigurationError
from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.ingress.documents.reader import read_document
from osrdyne.ingress.policies.manifest import read_proposal
from osrdyne.protocol.names import parse_key

app = typer.Typer(help="Create, renew and remove queues of keys in a managed pool.", no_args_is_help=True)

FileOption = Annotated[
    str | None,
    typer.Option("--file", "-f", metavar="FILE", help="Policy elements, JSON or YAML; - reads standard input."),
]
ForOption = Annotated[
    str | None,
    typer.Option("--for", metavar="DURATION", help="Lifetime from now, e.g. 36h; sets ExpirationInstant."),
]


@app.command("list")
def list_queues(api: ApiOption = None, config: ConfigOption = None, output: OutputOption = Output.TABLE) -> None:
    """List the queues that you may discover."""
    daemon, found, after = remote(api, config), [], None
    while True:
        answer = daemon.get("/v1/queues", limit=500, after=after)
        found += answer["queues"]
        if answer["next"] is None:
            break
        [after] = parse_qs(urlsplit(answer["next"]).query, keep_blank_values=True)["after"]
    if output is Output.JSON:
        print_json(found)
        return
    rows = [
        (one["key"], one["state"] or "not created", ahead(one["expires_at"]) or "-", one["policy"], one["author"])
        for one in found
    ]
    print_table(("key", "state", "expires", "policy", "author"), rows, empty="There are no queues.")


@app.command()
def show(
    key: KeyArgument, api: ApiOption = None, config: ConfigOption = None, output: OutputOption = Output.TABLE
) -> None:
    """Show the queue of a key, with its effective policy and the origin of each value."""
    _print(remote(api, config).get("/v1/queue", key=parse_key(key)), output)


@app.command()
def create(
    key: KeyArgument,
    file: FileOption = None,
    lifetime: ForOption = None,
    author: AuthorOption = None,
    api: ApiOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Create the queue of a key with a policy of its own. Default lifetime: 24 hours."""
    document = _proposal(file, lifetime) or {}
    daemon, who = remote(api, config), author or own_name()
    _print(daemon.send("POST", "/v1/queues", document, key=parse_key(key), author=who), output)


@app.command()
def renew(
    key: KeyArgument,
    file: FileOption = None,
    lifetime: ForOption = None,
    author: AuthorOption = None,
    api: ApiOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Renew the queue of a key. Without --file its policy stays; without --for it lives for another 24 hours."""
    daemon, who = remote(api, config), author or own_name()
    document = _proposal(file, lifetime)
    if document is not None and file is None:
        present = daemon.get("/v1/queue", key=parse_key(key))["proposal"] or {}
        document = {**present, **document}
    _print(daemon.send("PUT", "/v1/queue", document, key=parse_key(key), author=who), output)


@app.command()
def delete(key: KeyArgument, author: AuthorOption = None, api: ApiOption = None, config: ConfigOption = None) -> None:
    """Remove the queue of a key. Requests that wait in it are answered `gone`."""
    remote(api, config).send("DELETE", "/v1/queue", None, key=parse_key(key), author=author or own_name())
    typer.echo("The queue is being removed. `osrdyne queues show` finds it until it is gone.")


def _proposal(file: str | None, lifetime: str | None) -> dict[str, Any] | None:
    """The document to send; None if nothing was given. Raises `ConfigurationError`."""
    if file is None and lifetime is None:
        return None
    document: dict[str, Any] = {}
    if file is not None:
        with opened(file) as text:
            written = text.read()
        try:
            document = read_proposal(read_document(written or "{}")).document()
        except InvalidDocumentError as error:
            raise error.in_file("standard input" if file == "-" else file) from None
    if lifetime is not None:
        try:
            seconds = parse_duration(lifetime)
            assert isinstance(seconds, float)
            expires = datetime.now(UTC) + timedelta(seconds=seconds)
        except ValueError as error:
            raise ConfigurationError(f"--for: {error}") from None
        except OverflowError:
            raise ConfigurationError("--for: too long; a created queue lives for 21 days at most.") from None
        document["ExpirationInstant"] = expires.isoformat(timespec="seconds").replace("+00:00", "Z")
    return document


def _print(queue: dict[str, Any], output: Output) -> None:
    if output is Output.JSON:
        print_json(queue)
        return
    typer.echo(f"key      {printable(queue['key'])}")
    typer.echo(
        f"queue    {printable(queue['queue'])} ({'exists' if queue['exists'] else 'is declared at the first request'})"
    )
    typer.echo(f"state    {queue['state'] or 'not created: declared for a request'}")
    if queue["created"]:
        typer.echo(f"expires  {ahead(queue['expires_at'])}")
        typer.echo(f"author   {printable(queue['author'])}")
    if queue["elements"] is None:
        typer.echo("No policy acts on this key.")
        return
    typer.echo(f"policy   {printable(queue['policy'])}")
    rows = [
        (name, json.dumps(one["value"]) if one["value"] is not None else "-", one["origin"])
        for name, one in queue["elements"].items()
    ]
    print_table(("element", "value", "origin"), rows, empty="")
