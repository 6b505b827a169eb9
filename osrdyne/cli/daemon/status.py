"""`osrdyne status`: the components of a running daemon, and the leader of its pool."""

from __future__ import annotations

import typer

from osrdyne.cli.options import ApiOption, ConfigOption, Output, OutputOption, remote
from osrdyne.cli.output import ago, print_json, print_table, printable


def status(api: ApiOption = None, config: ConfigOption = None, output: OutputOption = Output.TABLE) -> None:
    """Show the components of the daemon and the leader of the pool. Exit code 1 if a required component is not ok."""
    daemon = remote(api, config)
    ready = daemon.get("/ready")
    if output is Output.JSON:
        print_json(ready)
    else:
        leadership = daemon.get("/v1/leadership")
        term = f" (term {leadership['term']}, began {ago(leadership['since'])})" if leadership["leading"] else ""
        typer.echo(f"pool {ready['pool']}: {ready['role']}{term}")
        if ready["role"] == "standby":
            typer.echo(f"leader: {printable(ready['leader'] or 'none known')}")
        rows = [
            ("✔" if one["ok"] else "✘" if one["fatal"] else "!", one["name"], one["detail"])
            for one in ready["components"]
        ]
        print_table(("", "component", "detail"), rows, empty="The daemon reports no components: it is starting.")
    raise typer.Exit(0 if ready["ready"] else 1)
