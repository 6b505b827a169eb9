"""`osrdyne lag`: the lag of the groups of a pool."""

from __future__ import annotations

from typing import Any

import typer

from osrdyne.cli.options import ApiOption, ConfigOption, Output, OutputOption, remote
from osrdyne.cli.output import ago, hours_and_minutes, print_json, print_table


def lag(api: ApiOption = None, config: ConfigOption = None, output: OutputOption = Output.TABLE) -> None:
    """Show how many requests wait, since when, and when none will wait at the current trend."""
    answer = remote(api, config).get("/v1/lag")
    if output is Output.JSON:
        print_json(answer)
        return
    rows = [] if answer["total"] is None else [("all groups", *_cells(answer["total"]))]
    rows += [(one["key"], *_cells(one)) for one in answer["groups"]]
    print_table(
        ("key", "waiting", "oldest", "a minute", "drained in"), rows, empty="This daemon does not lead the pool."
    )
    if answer["as_of"] is not None:
        typer.echo(f"Listed {ago(answer['as_of'])}.")


def _cells(figures: Any) -> tuple[str, ...]:
    oldest = "-" if figures["seconds"] is None else hours_and_minutes(figures["seconds"])
    if figures["a_minute"] is None:
        return f"{figures['messages']:,}", oldest, "-", "-"
    drained = "never" if figures["drained_in"] is None else hours_and_minutes(figures["drained_in"])
    return f"{figures['messages']:,}", oldest, f"{figures['a_minute']:+.1f}", drained
