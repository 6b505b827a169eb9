"""`osrdyne capacity`: whether a load fits, when each limit is used up, and the cheapest tiers that hold the load."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from osrdyne.cli.manifests.commands import opened
from osrdyne.cli.options import ApiOption, ConfigOption, Output, OutputOption, load, remote
from osrdyne.cli.output import hours_and_minutes, print_json, print_table
from osrdyne.config.loading import problems_of
from osrdyne.config.types import duration_text, size_text
from osrdyne.config.yaml_file import parse_yaml
from osrdyne.errors import ConfigurationError
from osrdyne.ingress.quotas.kept import kept_by_pool
from osrdyne.ingress.quotas.question import CapacityQuestion, answer

if TYPE_CHECKING:
    from osrdyne.client.daemon_api import DaemonApi

_FLAGS = {"hub": "--hub", "hub_units": "--units", "store": "--store", "store_units": "--store-units"}
_FLAGS |= {"max_lag": "--max-lag", "rate": "--rate", "duration": "--for", "events": "--events"}
_FLAGS |= {"retention_days": "--retention-days"}
_FLAGS |= {"message_size": "--message-size", "event_size": "--event-size"}


def capacity(
    rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="Messages, e.g. 277/min, 12/s or 400000/day.")
    ] = None,
    events: Annotated[float, typer.Option(metavar="NUMBER", help="Events in one message, on average.")] = 1.0,
    message_size: Annotated[str, typer.Option(metavar="SIZE", help="Size of a message, e.g. 4KiB.")] = "1KiB",
    event_size: Annotated[str, typer.Option(metavar="SIZE", help="Size of an event, e.g. 800.")] = "1KiB",
    duration: Annotated[
        str | None, typer.Option("--for", metavar="DURATION", help="How long the rate lasts. Default: always.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="JSON or YAML with `load`: a list of phases with duration, rate, events, message_size and event_size.",
        ),
    ] = None,
    from_history: Annotated[
        bool,
        typer.Option("--from-history", help="Load of the busiest day that the quotas of the daemon have recorded."),
    ] = False,
    hub: Annotated[str, typer.Option(metavar="TIER", help="iot-hub-free, -s1, -s2 or -s3.")] = "iot-hub-s1",
    units: Annotated[int, typer.Option(metavar="NUMBER", help="Units of the hub.")] = 1,
    store: Annotated[str | None, typer.Option(metavar="TIER", help="store-s1 or store-s2. Default: no store.")] = None,
    store_units: Annotated[int, typer.Option(metavar="NUMBER", help="Units of the store.")] = 1,
    max_lag: Annotated[str, typer.Option(metavar="DURATION", help="How long an event may wait for the store.")] = "1m",
    retention_days: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="For how many days the store must keep each event.")
    ] = None,
    api: ApiOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show whether tiers hold a load, and the cheapest that do. Exit code 1 if the load does not fit."""
    if [rate is not None, profile is not None, from_history].count(True) != 1:
        raise typer.BadParameter("give one of --rate, --profile and --from-history", param_hint="--rate")
    if profile is not None:
        document = _read(profile)
    elif from_history:
        document = {"load": _recorded(remote(api, config), events, event_size), "repeats": True}
    else:
        phase = {"rate": rate, "events": events, "message_size": message_size, "event_size": event_size}
        document = {"load": [phase | ({} if duration is None else {"duration": duration})]}
    given = {"hub": hub, "hub_units": units, "store": store, "store_units": store_units, "max_lag": max_lag}
    given |= {"retention_days": retention_days}
    try:
        question = CapacityQuestion.model_validate(given | document)
    except ValidationError as error:
        problems = [
            _sentence(one.path, one.message, file=profile if {*one.path[:1]} <= {*document} else None)
            for one in problems_of(error, {})
        ]
        # Each phase of a recorded day has the same options.
        raise ConfigurationError("\n".join(dict.fromkeys(problems))) from None
    settings = load(config, None).settings
    found = answer(question, settings.prices.by_tier())
    found["pool"] = [asdict(kept) for kept in kept_by_pool(settings, question.to_load())]
    if output is Output.JSON:
        print_json(found)
    else:
        _print(found)
    if not found["fits"]:
        raise typer.Exit(1)


def _recorded(daemon: DaemonApi, events: float, event_size: str) -> list[dict[str, Any]]:
    """The busiest day of the record, a phase for each 15 minutes. Raises `ConfigurationError` if there is none."""
    usage = daemon.get("/v1/quota")["usage"]
    days = [] if usage is None else usage["days"]
    busiest = max(days, key=lambda day: sum(day["blocks"]), default=None)
    if busiest is None or not any(busiest["messages"]):
        raise ConfigurationError("The daemon has no record of use: it begins when quotas are set.")
    return [
        {
            "duration": 900,
            "rate": f"{4 * messages}/h",  # a whole number, unlike a rate a minute
            "events": events,
            "message_size": size // messages if messages else 0,
            "event_size": event_size,
        }
        for messages, size in zip(busiest["messages"], busiest["bytes"], strict=True)
    ]


def _read(file: str) -> dict[str, Any]:
    with opened(file) as text:
        written = text.read()
    try:
        document = json.loads(written) if Path(file).suffix == ".json" else None
    except ValueError as error:
        raise ConfigurationError(f"{file}: this is not JSON: {error}.") from None
    if document is None:
        located = parse_yaml(written, file)
        document = None if located is None else located.plain()
    if not isinstance(document, dict):
        raise ConfigurationError(f"{file}: a mapping with `load` is expected.")
    return document


def _sentence(path: tuple[str, ...], message: str, *, file: str | None) -> str:
    """An error with its place: the option, or the path in `file`."""
    if file is not None:
        return f"{file}: {'.'.join(path)}: {message}" if path else f"{file}: {message}"
    return f"{_FLAGS.get(path[-1], path[-1])}: {message}" if path else message


def _print(found: dict[str, Any]) -> None:
    rows = (
        (
            meter["meter"],
            _number(meter["demand"]),
            _number(meter["limit"]),
            f"{100 * meter['utilisation']:.1f} %",
            "-" if meter["gives_out"] is None else f"after {hours_and_minutes(meter['gives_out'])}",
            _number(meter["excess"]) if meter["excess"] else "-",
        )
        for meter in found["meters"]
    )
    print_table(("meter", "demand", "limit", "utilisation", "used up", "excess"), rows, empty="")
    typer.echo(f"Accepted: {_number(found['accepted'])} messages{' a day' if found['repeats'] else ''}.")
    if (queue := found["queue"]) is not None:
        _print_queue(queue)
    if (storage := found["storage"]) is not None:
        _print_storage(storage)
    typer.echo(f"Price: {_number(found['price'])} a month.")
    best = found["cheapest"]
    if best is None:
        typer.echo("No tiers hold this load.")
    else:
        store = "" if best["store"] is None else f" and {best['store_units']} × {best['store']}"
        typer.echo(
            f"Cheapest that holds: {best['hub_units']} × {best['hub']}{store}, {_number(best['price'])} a month."
        )
    _print_kept(found["pool"])
    for note in found["notes"]:
        typer.echo(f"note: {note}", err=True)
    typer.echo("The load fits." if found["fits"] else "The load does not fit.")


def _print_queue(queue: dict[str, Any]) -> None:
    if not queue["worst_events"]:
        typer.echo("Queue of the store: always empty.")
        return
    drained = "never" if queue["drained"] is None else f"after {hours_and_minutes(queue['drained'])}"
    typer.echo(
        f"Queue of the store: grows by {_number(queue['growth_a_minute'])} a minute, up to "
        f"{_number(queue['worst_events'])} events; queued {hours_and_minutes(queue['queued'])}, worst lag "
        f"{hours_and_minutes(queue['worst_lag'])}, drained {drained}."
    )


def _print_storage(storage: dict[str, Any]) -> None:
    days = "" if storage["days"] is None else f", {_number(storage['days'])} days of this load"
    needed = "" if storage["needed"] is None else f"; the retention needs {_number(storage['needed'])}"
    typer.echo(f"Storage: {_number(storage['events'])} events{days}{needed}.")


def _print_kept(kept: list[dict[str, Any]]) -> None:
    rows = (
        (
            one["name"],
            "-" if one["max_age"] is None else duration_text(one["max_age"]),
            "-" if one["max_bytes"] is None else size_text(one["max_bytes"]),
            "-" if one["max_count"] is None else _number(one["max_count"]),
            "-" if one["days"] is None else f"{_number(one['days'])} days" + (", then paused" if one["pauses"] else ""),
        )
        for one in kept
    )
    print_table(("kept by the pool", "age", "size", "number", "of this load"), rows, empty="")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.2f}"
