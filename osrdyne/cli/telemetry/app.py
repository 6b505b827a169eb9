"""`osrdyne telemetry …`: the log of telemetry and its readers."""

from __future__ import annotations

from typing import Any

import typer

from osrdyne.cli.options import ApiOption, ConfigOption, Output, OutputOption, remote
from osrdyne.cli.output import ago, hours_and_minutes, print_json, print_table, printable
from osrdyne.cli.telemetry.replay import replay
from osrdyne.cli.telemetry.resend import resend
from osrdyne.cli.telemetry.simulator import simulate_devices

app = typer.Typer(
    help="Show the log of telemetry and the lag of its readers, simulate devices, and send messages again.",
    no_args_is_help=True,
)
app.command("simulate")(simulate_devices)
app.command("replay")(replay)
app.command("resend")(resend)
NO_LOG = "This pool has no log of telemetry (telemetry.name)."


@app.command()
def status(api: ApiOption = None, config: ConfigOption = None, output: OutputOption = Output.TABLE) -> None:
    """Show the partitions of the log with their streams and offsets, and what its tables have stored."""
    answer = remote(api, config).get("/v1/telemetry")
    if output is Output.JSON:
        print_json(answer)
        return
    if answer["name"] is None:
        typer.echo(NO_LOG)
        return
    rows = [
        (
            str(one["partition"]),
            one["stream"],
            "-" if one["first"] is None else f"{one['first']:,}",
            f"{one['next']:,}",
            f"{one['messages']:,}",
        )
        for one in answer["partitions"]
    ]
    typer.echo(f"log {answer['name']}")
    print_table(("partition", "stream", "first", "next", "messages"), rows, empty="It cannot be written.")
    if answer["tables"]:
        typer.echo()
        _print_tables(answer["tables"])


def _print_tables(tables: list[dict[str, Any]]) -> None:
    rows = [
        (
            printable(table["table"]),
            str(one["partition"]),
            f"{one['stored']:,}",
            f"{one['invalid']:,}",
            _state(one),
        )
        for table in tables
        for one in table["partitions"]
    ]
    print_table(("table", "partition", "stored", "invalid", "ingest"), rows, empty="")
    for table in tables:
        errors = {one["error"]: one for one in table["partitions"] if one["failures"]}
        for error, one in errors.items():
            typer.echo(f"{printable(table['table'])}: {one['code']}: {printable(error)}", err=True)


def _state(one: dict[str, Any]) -> str:
    """The state of a partition in the scheduler."""
    if one["in_flight"]:
        return "running"
    text = f"{one['failures']} failed ({one['code']})" if one["failures"] else ""
    if one["next_after"] is not None:
        text = f"{text}, " * bool(text) + f"next in {hours_and_minutes(one['next_after'])}"
    return text or "-"


@app.command()
def lag(api: ApiOption = None, config: ConfigOption = None, output: OutputOption = Output.TABLE) -> None:
    """Show the lag of each reader that has stored its position, in messages and in time."""
    answer = remote(api, config).get("/v1/telemetry")
    if output is Output.JSON:
        print_json(answer["readers"])
        return
    rows = []
    for reader in answer["readers"]:
        name = printable(reader["reader"])
        rows.append(
            (name, "all", "-", f"{reader['messages']:,}", _span(reader["seconds"]), "", _stored_at(reader["at"]))
        )
        rows += [
            (
                name,
                str(one["partition"]),
                f"{one['position']:,}",
                f"{one['messages']:,}",
                _span(one["seconds"]),
                f"{one['lost']:,} lost" if one["lost"] else "",
                "",
            )
            for one in reader["partitions"]
        ]
    empty = NO_LOG if answer["name"] is None else "No reader has stored a position."
    print_table(("reader", "partition", "position", "messages", "time", "", "stored"), rows, empty=empty)
    for reader in answer["readers"]:
        if (found := reader["forecast"]) is not None and reader["messages"]:
            typer.echo(f"{printable(reader['reader'])}: {_forecast(found)}")


def _forecast(found: dict[str, Any]) -> str:
    drained = "never" if found["drained"] is None else f"in {hours_and_minutes(found['drained'])}"
    return f"{found['rate_in']:,.1f} messages a minute come in, {found['rate_out']:,.1f} are read; drained {drained}."


def _stored_at(at: float) -> str:
    return ago(at) if at else "never"


def _span(seconds: float | None) -> str:
    return "-" if seconds is None else hours_and_minutes(seconds)
