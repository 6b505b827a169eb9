"""`osrdyne status`: whether a running daemon is well, component by component."""

from __future__ import annotations

import typer

from osrdyne.cli.options import ApiOption, ConfigOption, Output, OutputOption, remote
from osrdyne.cli.output import print_json, print_table


def status(api: ApiOption = None, config: ConfigOption = None, output: OutputOption = Output.TABLE) -> None:
    """Show whether the daemon is well. Exit code 1 when a component is not."""
    daemon = remote(api, config)
    ready = daemon.get("/ready")
    if output is Output.JSON:
        print_json(ready)
    else:
        role = daemon.get("/v1/leadership")["detail"]
        typer.echo(f"pool {ready['pool']}, {ready['role']}: {role}")
        rows = [("✔" if one["ok"] else "✘", one["name"], one["detail"]) for one in ready["components"]]
        print_table(("", "component", "detail"), rows, empty="It reports no component.")
    raise typer.Exit(0 if ready["ready"] else 1)
