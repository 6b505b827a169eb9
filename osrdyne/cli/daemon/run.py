"""`osrdyne run`: the daemon of one pool, in the foreground."""

from __future__ import annotations

from typing import Annotated

import typer

from osrdyne.cli.daemon.app_check import start_check
from osrdyne.cli.options import ConfigOption, DriverOption, LogLevelOption, PoolOption, SetOption, load
from osrdyne.config.models import LogSettings
from osrdyne.logs import configure_logging


def run(
    config: ConfigOption = None,
    assignments: SetOption = None,
    pool: PoolOption = None,
    driver: DriverOption = None,
    log_level: LogLevelOption = None,
    stop_workers: Annotated[
        bool,
        typer.Option(
            "--stop-workers",
            help="Stop the workers when the daemon ends. Default: the next daemon adopts them.",
        ),
    ] = False,
) -> None:
    """Run the daemon of one pool until SIGTERM or SIGINT."""
    settings = load(config, assignments, pool=pool, driver=driver, log_level=log_level).settings
    start_logging(settings.log)
    application_checked = start_check(settings)  # while the daemon's modules are imported
    from osrdyne.daemon.daemon import (
        run as run_daemon,  # after the settings were checked, because it takes a while
    )

    application_checked()
    run_daemon(settings, stop_workers=stop_workers)


def start_logging(settings: LogSettings) -> None:
    """Set up the logs of a long-running command."""
    configure_logging(level=settings.level, json={"auto": None, "json": True, "text": False}[settings.format])
