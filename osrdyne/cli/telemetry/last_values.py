"""`osrdyne last-value` runs the last-value reader; `osrdyne last` shows last values."""

from __future__ import annotations

import asyncio
import signal
from datetime import datetime
from typing import Annotated, Any

import typer

from osrdyne.cli.daemon.run import start_logging
from osrdyne.cli.options import (
    ApiOption,
    ConfigOption,
    JsonOption,
    KeyArgument,
    LogLevelOption,
    PoolOption,
    SetOption,
    load,
    remote,
)
from osrdyne.cli.output import ago, print_json, print_table
from osrdyne.config.models import Settings
from osrdyne.errors import ConfigurationError
from osrdyne.protocol.names import parse_key

PAGE = 1_000


def last(
    key: KeyArgument,
    series: Annotated[str | None, typer.Argument(metavar="SERIES", help="Only this series.")] = None,
    api: ApiOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the last value of each series of a key."""
    daemon = remote(api, config)
    found: list[dict[str, Any]] = []
    after = None
    while True:
        page = daemon.get("/v1/last", key=parse_key(key), series=series, after=after, limit=PAGE)
        found += page["values"]
        after = page["next"]
        if after is None:
            break
    if as_json:
        print_json(found)
        return
    rows = [(one["series"], _shown(one), one["kind"], one["quality"], one["ts"], _age(one["ts"])) for one in found]
    print_table(("series", "value", "kind", "quality", "time", ""), rows, empty="There is no last value of this key.")


def _shown(value: dict[str, Any]) -> str | None:
    number = value["value"]
    return value["value_text"] if number is None else f"{number:.15g}"


def _age(moment: str) -> str:
    return ago(datetime.fromisoformat(moment).timestamp())


def run(
    config: ConfigOption = None,
    assignments: SetOption = None,
    pool: PoolOption = None,
    log_level: LogLevelOption = None,
) -> None:
    """Run the last-value reader of a pool's log until SIGTERM or SIGINT."""
    settings = load(config, assignments, pool=pool, log_level=log_level).settings
    if settings.telemetry.name is None:
        raise ConfigurationError("This pool has no log of telemetry to read: set telemetry.name.")
    start_logging(settings.log)
    import uvloop

    uvloop.run(_run_until_signal(settings))


async def _run_until_signal(settings: Settings) -> None:
    from osrdyne.telemetry.last_values.reader import run_reader

    reading = asyncio.create_task(run_reader(settings), name="last-value reader")
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, reading.cancel)
    await asyncio.wait({reading})
    if not reading.cancelled():
        reading.result()
