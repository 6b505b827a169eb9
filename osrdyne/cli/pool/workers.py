"""`osrdyne workers …`: the processes of pooled workers of a running daemon."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from osrdyne.cli.options import ApiOption, ConfigOption, Output, OutputOption, remote
from osrdyne.cli.output import STANDBY, ago, core_time, log_line, print_json, print_table, printable, start_parts

app = typer.Typer(help="Show the processes that pooled workers share.", no_args_is_help=True)

ProcessArgument = Annotated[
    str, typer.Argument(metavar="PROCESS", help="Worker id of the process, or a unique prefix.")
]
_MIB = 2**20


@app.command("list")
def list_workers(api: ApiOption = None, config: ConfigOption = None, output: OutputOption = Output.TABLE) -> None:
    """List the processes of pooled workers: keys, requests, memory, age."""
    answer = remote(api, config).get("/v1/processes")
    if output is Output.JSON:
        if not answer["leading"]:
            typer.echo(STANDBY, err=True)
        print_json(answer["processes"])
        return
    empty = (
        "There are no processes that keys share: worker.placement is dedicated, or none has started yet."
        if answer["leading"]
        else STANDBY
    )
    columns = ("process", "state", "keys", "in flight", "heap", "memory", "served", "started", "external id")
    print_table(columns, [_row(process) for process in answer["processes"]], empty=empty)


@app.command()
def show(
    process: ProcessArgument,
    api: ApiOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show one process and the keys whose workers are in it."""
    found = remote(api, config).get(f"/v1/processes/{quote(process, safe='')}")
    if output is Output.JSON:
        print_json(found)
        return
    typer.echo(f"process      {found['worker_id']} (external id {printable(found['external_id'])})")
    typer.echo(f"state        {found['state']}{_because(found)}")
    typer.echo(f"profile      {printable(found.get('profile') or '-')}")
    typer.echo(f"started      {ago(found['started_at'])}")
    if found.get("cold_start"):
        typer.echo(f"cold start   {start_parts(found['cold_start'])}")
    typer.echo(f"last report  {ago(found['last_report_at'])}")
    typer.echo(f"heap         {_heap(found)}")
    typer.echo(f"memory       {_size(found['memory'])}")
    if found.get("memory_share") is not None:
        typer.echo(f"host         {found['memory_share']:.0%} of the memory of its host or cgroup is used")
    typer.echo(f"served       {found['requests']} requests, {found['in_flight']} in flight")
    typer.echo(f"executors    {core_time(found.get('executor_seconds'))} of tasks, on one core")
    print_table(("key",), [(key,) for key in found["keys"]], empty="It has no worker.")


@app.command()
def logs(
    process: ProcessArgument,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=10_000, help="Number of lines.")] = 100,
    api: ApiOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the last log lines of one process, of all its keys."""
    answer = remote(api, config).get(f"/v1/processes/{quote(process, safe='')}/logs", lines=lines)
    if output is Output.JSON:
        print_json(answer["lines"])
        return
    for line in answer["lines"]:
        typer.echo(log_line(line))


def _row(process: dict[str, Any]) -> tuple[object, ...]:
    return (
        process["worker_id"],
        process["state"],
        len(process["keys"]),
        process["in_flight"],
        _heap(process),
        _size(process["memory"]),
        process["requests"],
        ago(process["started_at"]),
        process["external_id"],
    )


def _because(process: dict[str, Any]) -> str:
    if process["retiring"] is not None:
        return f": {printable(process['retiring'])}"
    return "" if process["alone"] is None else f": it takes the key {printable(process['alone'])} only"


def _heap(process: dict[str, Any]) -> str:
    if process["heap_used"] is None:
        return "-"
    return f"{_size(process['heap_used'])} of {_size(process['heap_max'])}"


def _size(size: int | None) -> str:
    return "-" if size is None else f"{size / _MIB:.0f} MiB"
