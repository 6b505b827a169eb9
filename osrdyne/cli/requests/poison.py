"""`osrdyne poison …`: the requests that no worker finished."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, TextIO

import typer

from osrdyne.cli.options import ApiOption, ConfigOption, Output, OutputOption, daemon_address, positive_seconds
from osrdyne.cli.output import ago, log_line, print_json, print_table, printable
from osrdyne.client.poison import PoisonClient, PoisonEntry, PoisonOutcome
from osrdyne.errors import ConfigurationError
from osrdyne.protocol.names import parse_key

app = typer.Typer(help="List requests that no worker finished, send them again or drop them.", no_args_is_help=True)

EntryArgument = Annotated[str, typer.Argument(metavar="ENTRY", help="Id of the entry, or a unique prefix.")]
EntriesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[ENTRY]...", help="Ids of entries, or unique prefixes.")
]
KeysOption = Annotated[
    list[str] | None, typer.Option("--key", metavar="KEY", help="Only entries of this key; repeatable.")
]
PathOption = Annotated[
    str | None, typer.Option("--path", metavar="PATH", help="Only entries for this handler, e.g. /sql.")
]
OlderOption = Annotated[
    str | None, typer.Option("--older-than", metavar="DURATION", help="Only entries older than this, e.g. 2h.")
]
NewerOption = Annotated[
    str | None, typer.Option("--newer-than", metavar="DURATION", help="Only entries newer than this, e.g. 30m.")
]
AllOption = Annotated[bool, typer.Option("--all", help="All entries.")]


class Filters:
    """The selection of entries by options."""

    def __init__(self, keys: list[str] | None, path: str | None, older: str | None, newer: str | None) -> None:
        self._keys = [parse_key(key) for key in keys or ()]
        self._path = path
        self._older = None if older is None else positive_seconds(older, option="--older-than")
        self._newer = None if newer is None else positive_seconds(newer, option="--newer-than")

    @property
    def any(self) -> bool:
        return bool(self._keys) or (self._path, self._older, self._newer) != (None, None, None)

    def find(self, client: PoisonClient, *, bodies: bool = False) -> Iterator[PoisonEntry]:
        return client.entries(
            keys=self._keys, path=self._path, older_than=self._older, newer_than=self._newer, bodies=bodies
        )


@app.command("list")
def list_poison(
    keys: KeysOption = None,
    path: PathOption = None,
    older_than: OlderOption = None,
    newer_than: NewerOption = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of entries.")] = 100,
    api: ApiOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the poison inventory, oldest first; nothing is consumed."""
    filters = Filters(keys, path, older_than, newer_than)
    found = list(islice(filters.find(_client(api, config)), limit))
    if output is Output.JSON:
        print_json([entry.document for entry in found])
        return
    columns = ("entry", "key", "path", "deliveries", "deaths", "replays", "came", "finding")
    empty = "The poison inventory has no such entry." if filters.any else "The poison inventory is empty."
    print_table(columns, map(_row, found), empty=empty)


@app.command()
def show(
    entry: EntryArgument, api: ApiOption = None, config: ConfigOption = None, output: OutputOption = Output.TABLE
) -> None:
    """Show one entry: the evidence of its failures, its headers and its body."""
    found = _client(api, config).entry(entry)
    document = found.document
    if output is Output.JSON:
        print_json(document)
        return
    for name in ("id", "key", "path", "reason", "correlation_id", "reply_to", "deliveries", "unexplained", "replays"):
        typer.echo(f"{name:15} {printable(document[name])}")
    typer.echo(f"{'published':15} {ago(found.first_at)}")
    typer.echo(f"{'came':15} {ago(found.last_at)}")
    typer.echo(f"{'finding':15} {printable(found.finding)}")
    for death in found.deaths:
        beside = f", {death.others} other requests beside it" if death.others else ""
        said = f": {printable(death.said)}" if death.said else ""
        typer.echo(f"{ago(death.at)}: worker {death.worker_id} ended with {death.ended_with}{said}{beside}")
        for line in death.log_lines:
            typer.echo(f"    {log_line(line)}")
    print_table(("header", "value"), found.headers.items(), empty="It has no headers.")
    typer.echo(f"body ({document['body_encoding']}):")
    for line in document["body"].splitlines():
        typer.echo(log_line(line))


@app.command()
def replay(
    entries: EntriesArgument = None,
    keys: KeysOption = None,
    path: PathOption = None,
    older_than: OlderOption = None,
    newer_than: NewerOption = None,
    everything: AllOption = False,
    api: ApiOption = None,
    config: ConfigOption = None,
) -> None:
    """Send requests again, unchanged, and remove their entries."""
    client = _client(api, config)
    chosen = _chosen(client, entries, Filters(keys, path, older_than, newer_than), everything)
    _report(client.replay(*chosen), "replayed")


@app.command()
def drop(
    entries: EntriesArgument = None,
    keys: KeysOption = None,
    path: PathOption = None,
    older_than: OlderOption = None,
    newer_than: NewerOption = None,
    everything: AllOption = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    api: ApiOption = None,
    config: ConfigOption = None,
) -> None:
    """Remove entries permanently, after a confirmation."""
    client = _client(api, config)
    chosen = _chosen(client, entries, Filters(keys, path, older_than, newer_than), everything)
    if chosen and not yes and not typer.confirm(f"Drop {_count(len(chosen))} permanently?", err=True):
        raise typer.Exit(1)
    _report(client.drop(*chosen), "dropped")


@app.command()
def export(
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="Output file. Default: standard output.")
    ] = None,
    keys: KeysOption = None,
    path: PathOption = None,
    older_than: OlderOption = None,
    newer_than: NewerOption = None,
    api: ApiOption = None,
    config: ConfigOption = None,
) -> None:
    """Write entries with their bodies as JSON lines; they stay in the inventory."""
    found = Filters(keys, path, older_than, newer_than).find(_client(api, config), bodies=True)
    count = 0
    with _opened(to) as file:
        for entry in found:
            file.write(json.dumps(entry.document, ensure_ascii=False) + "\n")
            count += 1
    typer.echo(f"Wrote {_count(count)}.", err=True)


def _client(api: str | None, config: str | None) -> PoisonClient:
    url, ca_file = daemon_address(api, config)
    return PoisonClient(url, ca_file=ca_file)


def _chosen(client: PoisonClient, entries: list[str] | None, filters: Filters, everything: bool) -> list[str]:
    """The ids by arguments and options. Raises `ConfigurationError` if neither selects entries."""
    if bool(entries) + filters.any + everything != 1:
        raise ConfigurationError("Give the ids of entries, or select them with --key, --path, an age, or --all.")
    return entries or [entry.id for entry in filters.find(client)]


def _report(outcome: PoisonOutcome, done: str) -> None:
    for name, why in outcome.refused.items():
        typer.echo(f"{printable(name)}: {printable(why)}", err=True)
    for name in outcome.missing:
        typer.echo(f"{printable(name)}: no such entry, or more than one.", err=True)
    typer.echo(f"{_count(len(outcome.done))} {done}.")
    if outcome.refused or outcome.missing:
        raise typer.Exit(1)


@contextmanager
def _opened(to: Path | None) -> Iterator[TextIO]:
    if to is None:
        yield sys.stdout
        return
    try:
        with to.open("w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise ConfigurationError(f"{to}: {error.strerror}.") from error


def _count(entries: int) -> str:
    return "1 entry" if entries == 1 else f"{entries} entries"


def _row(entry: PoisonEntry) -> tuple[object, ...]:
    deaths = len(entry.deaths)
    return (
        entry.id[:12], entry.key, entry.path, entry.deliveries, deaths, entry.replays, ago(entry.last_at), entry.finding
    )  # fmt: skip
