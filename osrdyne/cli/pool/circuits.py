"""`osrdyne circuits …`: the share of failed requests of each route, and the groups that are paused for it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from osrdyne.cli.manifests.commands import ManifestCommands, own_name
from osrdyne.cli.options import ApiOption, ConfigOption, Output, OutputOption, remote
from osrdyne.cli.output import ago, print_json, print_table, printable
from osrdyne.errors import ConfigurationError
from osrdyne.ingress.circuits.configuration import CircuitConfiguration, load_circuits
from osrdyne.pool.routing.manifest_store import ManifestKind

app = typer.Typer(
    help="Show and close the circuits of a managed pool, which pause groups while requests of a route fail.",
    no_args_is_help=True,
)
configuration = typer.Typer(help="Manage the configuration of the circuits.", no_args_is_help=True)
app.add_typer(configuration, name="config")

NAMES_SHOWN = 10  # Circuits that an error names.
CIRCUIT_HELP = "Hash of the circuit, as listed by `list`, or name of its route."
CircuitArgument = Annotated[str, typer.Argument(metavar="CIRCUIT", help=CIRCUIT_HELP)]


def print_settings(found: CircuitConfiguration) -> None:
    rows = [(name, _shown(value)) for name, value in found.document().items()]
    print_table(("setting", "value"), rows, empty="")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(one)}" for name, one in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)


commands = ManifestCommands(
    ManifestKind.CIRCUITS,
    load=load_circuits,
    print_meaning=print_settings,
    none="no outcome is counted.",
    size="changed settings",
    applies="at once",
    noun="configuration",
)
commands.add_to(configuration)


@app.command("list")
def list_circuits(api: ApiOption = None, config: ConfigOption = None, output: OutputOption = Output.TABLE) -> None:
    """List the circuits with their fail ratios."""
    circuits = remote(api, config).get("/v1/circuits/_all")["circuits"]
    if output is Output.JSON:
        print_json(circuits)
        return
    rows = [
        (one["hash"], *_name(one), one["status"], f"{one['fail_ratio']} %", one["failures"], one["successes"])
        for one in circuits
    ]
    empty = "No circuit: no outcome has been counted. `osrdyne circuits config show` says whether they are counted."
    print_table(("hash", "route", "key", "state", "failed", "failures", "successes"), rows, empty=empty)


@app.command()
def show(
    circuit: CircuitArgument, api: ApiOption = None, config: ConfigOption = None, output: OutputOption = Output.TABLE
) -> None:
    """Show one circuit."""
    found = _find(circuit, remote(api, config).get("/v1/circuits/_all")["circuits"])
    if len(found) > 1:
        raise ConfigurationError(f"Route {circuit!r} has {len(found)} circuits. Name one by its hash: {_listed(found)}")
    (one,) = found
    if output is Output.JSON:
        print_json(one)
        return
    route, key = _name(one)
    rows = [
        ("route", route),
        ("key", key),
        ("state", f"{one['status']}, since {ago(one['since'])}"),
        ("fail ratio", f"{one['fail_ratio']} %"),
        ("failures", one["failures"]),
        ("successes", one["successes"]),
        ("paused groups", one["paused"]),
    ]
    print_table(("circuit", printable(one["hash"])), rows, empty="")


@app.command()
def close(
    circuit: Annotated[
        str | None,
        typer.Argument(metavar="[CIRCUIT]", help=f"{CIRCUIT_HELP} All circuits of the route are closed."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Close every circuit.")] = False,
    author: Annotated[
        str | None, typer.Option("--author", metavar="NAME", help="Who closes it. Default: user@host.")
    ] = None,
    api: ApiOption = None,
    config: ConfigOption = None,
) -> None:
    """Close a circuit by hand: its groups are resumed, and counting starts again."""
    if everything == (circuit is not None):
        raise ConfigurationError("Name one circuit by its hash or its route, or close all of them with --all.")
    daemon, names = remote(api, config), ["_all"]
    if circuit is not None:
        names = [one["hash"] for one in _find(circuit, daemon.get("/v1/circuits/_all")["circuits"])]
    closed: list[str] = []
    for name in names:
        path = f"/v1/circuits/{name}/status"
        closed += daemon.send("PUT", path, {"status": "closed"}, author=author or own_name())["closed"]
    typer.echo(
        f"Closed: {', '.join(map(printable, closed))}."
        if closed
        else "Closed already: only the statistics are cleared."
    )


def _find(circuit: str, circuits: list[Any]) -> list[Any]:
    """The circuit with this hash, or those of the route with this name."""
    # The name of a route may look like a hash: the hash of an existing circuit takes precedence.
    found = [one for one in circuits if one["hash"] == circuit] or [one for one in circuits if one["route"] == circuit]
    if found:
        return found
    if not circuits:
        raise ConfigurationError(f"There is no circuit {circuit!r}: no outcome has been counted.")
    raise ConfigurationError(
        f"There is no circuit {circuit!r}. Name one by its hash, or by its route: {_listed(circuits)}"
    )


def _listed(circuits: list[Any]) -> str:
    """Hashes with route and key, for an error."""
    shown = [f"{one['hash']} ({', '.join(_name(one))})" for one in circuits[:NAMES_SHOWN]]
    more = len(circuits) - len(shown)
    return "; ".join(shown) + (f"; and {more} more, see `osrdyne circuits list`." if more else ".")


def _name(one: Any) -> tuple[str, str]:
    route = "requests of no named route" if one["route"] is None else one["route"]
    return route, "all" if one["key"] is None else one["key"]
