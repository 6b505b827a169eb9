"""`osrdyne policies …`: limits of the size, age and number of the requests of a key."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import typer

from osrdyne.cli.manifests.commands import ManifestCommands
from osrdyne.cli.options import ApiOption, ConfigOption, KeyArgument, Output, OutputOption, remote
from osrdyne.cli.output import print_json, print_table
from osrdyne.config.models import Settings
from osrdyne.ingress.documents.problems import Problem
from osrdyne.ingress.policies.authorization import unverifiable
from osrdyne.ingress.policies.manifest import PolicyManifest, load_policies
from osrdyne.ingress.policies.table import bounds_of, warn_of_clamped
from osrdyne.pool.routing.manifest_store import ManifestKind
from osrdyne.protocol.names import parse_key

app = typer.Typer(
    help="Manage queue policies of a managed pool: limits of the requests by key, such as MaxQueueLength.",
    no_args_is_help=True,
)


def print_policies(manifest: PolicyManifest) -> None:
    rows = []
    for place, (_, policy) in enumerate(manifest.places, start=1):
        elements = policy.document()
        elements.pop("match", None)
        shown = " · ".join(f"{name} {value}" for name, value in elements.items())
        rows.append((place, "all others" if policy.match is None else policy.match, shown or "the defaults"))
    print_table(("", "keys", "elements"), rows, empty="No policy: nothing limits the requests of a key.")


def _warnings(manifest: PolicyManifest, settings: Settings) -> Iterator[Problem]:
    yield from unverifiable(manifest, bounds_of(settings))
    yield from warn_of_clamped(manifest, bounds=bounds_of(settings), now=datetime.now(UTC))


commands = ManifestCommands(
    ManifestKind.POLICIES,
    load=load_policies,
    print_meaning=print_policies,
    none="no policy acts on any key.",
    size="policies",
    warnings=_warnings,
    noun="document",
)
commands.add_to(app)


@app.command()
def effective(
    key: KeyArgument, api: ApiOption = None, config: ConfigOption = None, output: OutputOption = Output.TABLE
) -> None:
    """Show the policy of a key: the value of each element, and whether it was proposed, clamped, computed or a
    default."""
    answer = remote(api, config).get("/v1/policies/effective", key=parse_key(key))
    if output is Output.JSON:
        print_json(answer)
        return
    if answer["elements"] is None:
        typer.echo("No policy acts on this key.")
        return
    name = "the default" if answer["match"] is None else f"the pattern {answer['match']!r}"
    typer.echo(f"policy of {name}")
    rows = [
        (element, "-" if one["value"] is None else one["value"], one["origin"])
        for element, one in answer["elements"].items()
    ]
    print_table(("element", "value", "origin"), rows, empty="")
