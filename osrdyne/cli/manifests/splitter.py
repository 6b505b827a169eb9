"""`osrdyne splitter …`: the distribution of the requests of a key of a managed pool to several groups."""

from __future__ import annotations

import typer

from osrdyne.cli.manifests.commands import ManifestCommands
from osrdyne.cli.output import print_table
from osrdyne.ingress.splitter.manifest import SplitterManifest, load_splitter
from osrdyne.ingress.splitter.rules import FromHash, FromRequest, FromStatic, Rule
from osrdyne.pool.routing.manifest_store import ManifestKind

app = typer.Typer(
    help="Manage the splitter of a managed pool: it distributes requests of one key to several groups.",
    no_args_is_help=True,
)


def print_rules(manifest: SplitterManifest) -> None:
    rows = (
        (place, rule.name, rule.delimiter, _meaning(rule), rule.description or "-")
        for place, rule in enumerate(manifest.rules, start=1)
    )
    print_table(("", "keys", "delimiter", "postfix", "description"), rows, empty="No rule: no key is split.")


def _meaning(rule: Rule) -> str:
    match rule.postfix:
        case FromStatic(names):
            return f"in turn: {', '.join(names)}"
        case FromHash(header, buckets):
            return f"header {header} hashed, 0 to {buckets - 1}"
        case FromRequest(url, header):
            given = ["" if url is None else f"path by {url.text}", "" if header is None else f"header {header}"]
            return ", then ".join(filter(None, given))


commands = ManifestCommands(
    ManifestKind.SPLITTER, load=load_splitter, print_meaning=print_rules, none="no key is split.", size="rules"
)
commands.add_to(app)
