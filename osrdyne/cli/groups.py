"""`osrdyne groups …`: the worker groups of a running daemon, and the environment of a worker without a driver."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from osrdyne.cli.options import (
    ApiOption,
    ConfigOption,
    JsonOption,
    KeyArgument,
    Output,
    OutputOption,
    PoolOption,
    SetOption,
    load,
    remote,
)
from osrdyne.cli.output import ago, ahead, log_line, print_json, print_table, printable
from osrdyne.protocol.names import PoolNames, parse_key

app = typer.Typer(help="List, start and stop worker groups.", no_args_is_help=True)


@app.command("list")
def list_groups(api: ApiOption = None, config: ConfigOption = None, output: OutputOption = Output.TABLE) -> None:
    """List all worker groups."""
    answer = remote(api, config).get("/v1/groups")
    if output is Output.JSON:
        print_json(answer["groups"])
        return
    empty = "There are no groups." if answer["leading"] else "This daemon does not lead: the leader knows the groups."
    columns = ("key", "state", "workers", "last activity", "next", "reason")
    print_table(columns, [_row(group) for group in answer["groups"]], empty=empty)


@app.command()
def show(
    key: KeyArgument, api: ApiOption = None, config: ConfigOption = None, output: OutputOption = Output.TABLE
) -> None:
    """Show one worker group: its state and the reason, its queue and its workers."""
    group = remote(api, config).get("/v1/group", key=parse_key(key))
    if output is Output.JSON:
        print_json(group)
        return
    queue = group["queue"]
    bound = "bound" if queue["bound"] else "not bound" if queue["exists"] else "does not exist"
    typer.echo(f"key            {printable(group['key'])}")
    typer.echo(f"state          {group['state']}{' (pinned)' if group['pinned'] else ''}: {printable(group['reason'])}")
    typer.echo(f"next           {_next(group)}")
    typer.echo(f"last activity  {ago(group['last_activity_at'])}")
    typer.echo(f"queue          {queue['name']} ({bound})")
    for one in group["waiting"]:
        name = "default" if one["priority"] is None else one["priority"]
        typer.echo(f"waiting        {one['requests']} with priority {name}{_age(one['oldest_age'])}")
    typer.echo(f"generation     {group['generation']}")
    rows = [
        (
            one["worker_id"],
            one["state"],
            one["in_flight"],
            one["process"] or "its own",
            one["external_id"],
            ago(one["started_at"]),
        )
        for one in group["workers"]
    ]
    columns = ("worker", "state", "in flight", "process", "external id", "started")
    print_table(columns, rows, empty="It has no worker.")
    for one in group["workers"]:
        if one.get("cold_start"):
            parts = " · ".join(f"{name} {took / 1000:.1f} s" for name, took in one["cold_start"].items())
            typer.echo(f"cold start of {one['worker_id']}: {parts}")


def _age(seconds: float | None) -> str:
    return "" if seconds is None else f", the oldest for {seconds:.0f} s"


@app.command()
def start(key: KeyArgument, api: ApiOption = None, config: ConfigOption = None) -> None:
    """Start a group, as a request for its key would."""
    _ask(key, "start", "Start requested.", api, config)


@app.command()
def stop(key: KeyArgument, api: ApiOption = None, config: ConfigOption = None) -> None:
    """Begin a group's orderly end now; nothing queued is lost."""
    _ask(key, "stop", "The group will stop when its work is done.", api, config)


@app.command()
def pin(key: KeyArgument, api: ApiOption = None, config: ConfigOption = None) -> None:
    """Keep a group active until it is unpinned."""
    _ask(key, "pin", "The group is pinned.", api, config)


@app.command()
def unpin(key: KeyArgument, api: ApiOption = None, config: ConfigOption = None) -> None:
    """Let a pinned group end when it is idle."""
    _ask(key, "unpin", "The group is not pinned any more.", api, config)


@app.command()
def logs(
    key: KeyArgument,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=1, max=10_000, help="Number of lines for each worker.")
    ] = 100,
    api: ApiOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the last log lines of a group's workers."""
    answer = remote(api, config).get("/v1/group/logs", key=parse_key(key), lines=lines)
    if output is Output.JSON:
        print_json(answer["workers"])
        return
    if not answer["workers"]:
        typer.echo("No worker of this group has written anything that is still known.")
    for worker, text in answer["workers"].items():
        typer.echo(f"== {printable(worker)}")
        for line in text:
            typer.echo(log_line(line))


@app.command()
def env(
    key: KeyArgument,
    config: ConfigOption = None,
    assignments: SetOption = None,
    pool: PoolOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the environment for a worker that you start yourself, as shell commands.

    The AMQP URI is printed with its password. Use it as: eval "$(osrdyne groups env KEY)" && osrdyne-worker APP
    """
    settings = load(config, assignments, pool=pool).settings
    from osrdyne.broker.topology.layout import (
        QueueLayout,  # these take a while to import, and the other commands do without
    )
    from osrdyne.pool.workers.specs import worker_environment

    layout = QueueLayout(PoolNames(settings.pool.id), managed=settings.pool.is_managed)
    variables = worker_environment(settings, parse_key(key), layout).to_variables()
    if as_json:
        print_json(variables)
        return
    for name, value in variables.items():
        typer.echo(f"export {name}={shlex.quote(value)}")


def _ask(key: str, action: str, done: str, api: str | None, config: str | None) -> None:
    remote(api, config).post(f"/v1/group/{action}", key=parse_key(key))
    typer.echo(done)


def _row(group: dict[str, Any]) -> tuple[str, ...]:
    workers = ", ".join(worker["state"] for worker in group["workers"])
    state = f"{group['state']}{' (pinned)' if group['pinned'] else ''}"
    return group["key"], state, workers or "-", ago(group["last_activity_at"]), _next(group), group["reason"]


def _next(group: dict[str, Any]) -> str:
    following = group["next_transition"]
    return "-" if following is None else f"{following['state']} {ahead(following['at'])}".strip()
