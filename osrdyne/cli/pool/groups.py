"""`osrdyne groups …`: the worker groups of a running daemon, and the environment of a worker without a driver."""

from __future__ import annotations

import shlex
import time
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
from osrdyne.cli.output import (
    STANDBY,
    ago,
    ahead,
    core_time,
    log_line,
    print_json,
    print_table,
    printable,
    start_parts,
)
from osrdyne.config.profiles import profile_of
from osrdyne.config.types import duration_text, size_text
from osrdyne.protocol.names import PoolNames, parse_key

app = typer.Typer(help="List, start and stop worker groups.", no_args_is_help=True)


@app.command("list")
def list_groups(api: ApiOption = None, config: ConfigOption = None, output: OutputOption = Output.TABLE) -> None:
    """List all worker groups."""
    answer = remote(api, config).get("/v1/groups")
    if output is Output.JSON:
        if not answer["leading"]:
            typer.echo(STANDBY, err=True)
        print_json(answer["groups"])
        return
    empty = "There are no groups." if answer["leading"] else STANDBY
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
    typer.echo(f"profile        {printable(group['profile'] or 'none (settings of the pool)')}")
    if group["policy"]:
        typer.echo(f"policy         {printable(group['policy'])} (osrdyne policies effective KEY)")
    if group["settings"]:
        typer.echo(f"settings       {printable(_settings(group['settings']))}")
    rows = [
        (
            one["worker_id"],
            one["state"],
            one["in_flight"],
            one["process"] or "its own",
            one["external_id"],
            ago(one["started_at"]),
            core_time(one.get("executor_seconds")),
        )
        for one in group["workers"]
    ]
    columns = ("worker", "state", "in flight", "process", "external id", "started", "executor time")
    print_table(columns, rows, empty="It has no worker.")
    for one in group["workers"]:
        if one.get("events_per_minute"):
            typer.echo(f"rate of {one['worker_id']}: {one['events_per_minute']:g} events a minute")
        if one.get("cold_start"):
            typer.echo(f"cold start of {one['worker_id']}: {start_parts(one['cold_start'])}")


def _settings(settings: dict[str, Any]) -> str:
    texts = {
        **settings,
        "memory": size_text(settings.get("memory") or 0),
        "spark_conf": " ".join(settings.get("spark_conf", ())) or "-",
        "unbind_delay": duration_text(settings.get("unbind_delay") or 0),
        "stop_delay": duration_text(settings.get("stop_delay") or 0),
    }
    return " · ".join(f"{name} {texts[name]}" for name in settings)


def _age(seconds: float | None) -> str:
    return "" if seconds is None else f", the oldest for {seconds:.0f} s"


@app.command()
def start(key: KeyArgument, api: ApiOption = None, config: ConfigOption = None) -> None:
    """Start a group, as a request for its key would."""
    _ask(key, "start", "Start requested.", api, config)


@app.command()
def stop(key: KeyArgument, api: ApiOption = None, config: ConfigOption = None) -> None:
    """Stop a group when its work is done; no queued request is lost."""
    answer = remote(api, config).post("/v1/group/stop", key=parse_key(key))
    if answer.get("has_group", True):  # an earlier version does not say
        typer.echo("The group will stop when its work is done.")
    else:
        typer.echo(
            "There is no group for this key, so there is nothing to stop. `osrdyne groups list` shows the groups."
        )


@app.command()
def pin(key: KeyArgument, api: ApiOption = None, config: ConfigOption = None) -> None:
    """Keep a group active until it is unpinned."""
    _ask(key, "pin", "The group is pinned.", api, config)


@app.command()
def unpin(key: KeyArgument, api: ApiOption = None, config: ConfigOption = None) -> None:
    """Let a pinned group end when it is idle."""
    _ask(key, "unpin", "The group is no longer pinned.", api, config)


@app.command("reload")
def reload_data(
    key: KeyArgument,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, max=3600, help="Time limit for the workers.")
    ] = 60.0,
    api: ApiOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Load the data of a group's workers again; requests are served meanwhile."""
    # Longer than the timeout of the daemon, whose answer names the workers that have not reported.
    daemon = remote(api, config, timeout=timeout + 10)
    workers = daemon.post("/v1/group/reload", key=parse_key(key), timeout=timeout)["workers"]
    if output is Output.JSON:
        print_json(workers)
    else:
        rows = [
            (one["worker_id"], one["outcome"], printable(one["reason"]) if one["reason"] else "-") for one in workers
        ]
        print_table(("worker", "outcome", "reason"), rows, empty="No worker runs; the next one loads the data.")
    if any(one["outcome"] in {"failed", "unknown"} for one in workers):
        raise typer.Exit(1)


@app.command()
def logs(
    key: KeyArgument,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=1, max=10_000, help="Number of lines for each worker.")
    ] = 100,
    previous: Annotated[
        bool, typer.Option("--previous", "-p", help="Of the workers before the present ones, and why they ended.")
    ] = False,
    api: ApiOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the last log lines of a group's workers."""
    asked = {"previous": True} if previous else {}  # a daemon of an earlier version does not know it
    answer = remote(api, config).get("/v1/group/logs", key=parse_key(key), lines=lines, **asked)
    ends = answer.get("ended", {})
    if output is Output.JSON:
        print_json({"workers": answer["workers"], "ended": ends} if previous else answer["workers"])
        return
    if not answer["workers"]:
        typer.echo(
            "No worker of this group has ended since the leader began."
            if previous
            else "There are no log lines of workers of this group. See those of ended workers with --previous."
        )
    for worker, text in answer["workers"].items():
        typer.echo(f"== {printable(worker)}{_end(ends.get(worker))}")
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

    A profile of worker.profiles that matches the key is applied. The AMQP URI is printed with its password.
    Use it as: eval "$(osrdyne groups env KEY)" && osrdyne-worker APP
    """
    settings = load(config, assignments, pool=pool).settings
    from osrdyne.broker.topology.layout import (
        QueueLayout,  # only this command needs it, and the import takes a while
    )
    from osrdyne.pool.workers.specs import worker_environment

    layout = QueueLayout(PoolNames(settings.pool.id), managed=settings.pool.is_managed)
    group = settings.with_profile(profile_of(settings.worker.profiles, key))
    variables = worker_environment(group, parse_key(key), layout).to_variables()
    if as_json:
        print_json(variables)
        return
    for name, value in variables.items():
        typer.echo(f"export {name}={shlex.quote(value)}")


def _end(end: dict[str, Any] | None) -> str:
    """How a worker has ended; empty if it has not."""
    if end is None:
        return ""
    reason = "" if end["reason"] is None else f": {printable(end['reason'])}"
    return f", ended {ago(end['at'])} with {printable(end['ended_with'])}{reason}"


def _ask(key: str, action: str, done: str, api: str | None, config: str | None) -> None:
    remote(api, config).post(f"/v1/group/{action}", key=parse_key(key))
    typer.echo(done)


def _row(group: dict[str, Any]) -> tuple[str, ...]:
    workers = ", ".join(worker["state"] for worker in group["workers"])
    state = f"{group['state']}{' (pinned)' if group['pinned'] else ''}"
    return group["key"], state, workers or "-", ago(group["last_activity_at"]), _next(group), group["reason"]


def _next(group: dict[str, Any]) -> str:
    following = group["next_transition"]
    if following is None:
        return "-"
    when = "soon" if following["at"] is not None and following["at"] <= time.time() else ahead(following["at"])
    return f"{following['state']} {when}".strip()
