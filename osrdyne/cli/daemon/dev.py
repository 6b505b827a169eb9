"""`osrdyne dev`: a whole stack in one command, to try osrdyne and to develop workers."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from osrdyne.aio.clock import SystemClock
from osrdyne.cli.daemon.app_check import check_app
from osrdyne.cli.daemon.run import start_logging
from osrdyne.cli.daemon.spark import start_training
from osrdyne.cli.main import INTERRUPTED
from osrdyne.cli.options import ConfigOption, LogLevelOption, PoolOption, SetOption, load
from osrdyne.config.loading import DEFAULT_FILE, FILE_VARIABLE
from osrdyne.config.models import Settings
from osrdyne.dev.announcement import announcement_file, find_announcement
from osrdyne.dev.app_watch import files_of, watch_app
from osrdyne.errors import ConfigurationError

if TYPE_CHECKING:
    from osrdyne.dev.stack import Beside

SAMPLE_SCALES = ("0.001", "0.01")


def dev(
    config: ConfigOption = None,
    assignments: SetOption = None,
    pool: PoolOption = None,
    log_level: LogLevelOption = None,
    app: Annotated[
        str | None, typer.Option(metavar="MODULE:ATTRIBUTE", help="Application to run instead of the SQL pipeline.")
    ] = None,
) -> None:
    """Run a private RabbitMQ, a daemon and its workers until Ctrl-C; with sample data unless a worker is configured."""
    given = [*(assignments or ()), *([f"worker.app={app}"] if app else ())]
    settings = load(config, given, pool=pool, log_level=log_level).settings
    running = find_announcement()
    if running is not None:
        raise ConfigurationError(f"osrdyne dev is already running (see {running}): stop it first, or use it.")
    start_logging(settings.log)
    import uvloop

    from osrdyne.dev.stack import sample_settings  # after the settings were checked, because it takes a while

    console = Console(stderr=True)
    with console.status("Checking the application"):
        check_app(settings)
    untouched = type(settings.worker)()
    if (settings.worker.app, settings.worker.config) == (untouched.app, untouched.config):
        with console.status("Generating TPC-H sample data (once)"):
            settings = sample_settings(settings, scales=SAMPLE_SCALES)
    if not uvloop.run(_run(settings, console)):
        raise typer.Exit(INTERRUPTED)


async def _run(settings: Settings, console: Console) -> bool:
    """Run the stack until a signal; return whether it was up by then. A signal during its start cancels the start."""
    up, stop = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(_serve(settings, console, up, stop), name="osrdyne dev")
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def end() -> None:
        if not (stop.is_set() or up.is_set()):
            serving.cancel()
        stop.set()

    def hang_up() -> None:
        # The terminal is closed: what is written to it from now on would fail.
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in terminals:
            os.dup2(null, descriptor)
        os.close(null)
        end()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` ignores it
        loop.add_signal_handler(signal.SIGHUP, hang_up)
    await asyncio.wait({serving})
    if not serving.cancelled():
        serving.result()
    return up.is_set()


async def _serve(settings: Settings, console: Console, up: asyncio.Event, stop: asyncio.Event) -> None:
    from osrdyne.dev.stack import running_stack

    with console.status("Starting RabbitMQ and the daemon"):
        stack = running_stack(settings, beside=_watch(settings, console))
        running = await stack.__aenter__()
    up.set()
    training: subprocess.Popen[str] | None = None
    try:
        _greet(running, console)
        if settings.driver.name == "subprocess" and settings.worker.app == type(settings.worker)().app:
            training = start_training(settings)  # of the archive with which the SQL pipeline's workers start faster
        await stop.wait()
    finally:
        if training is not None:
            training.terminate()
        await stack.__aexit__(None, None, None)
        if training is not None:
            await asyncio.to_thread(training.wait)  # blocking the event loop would cost the daemon its leadership


def _watch(settings: Settings, console: Console) -> Beside | None:
    """Replace the workers when files of the application change; None if it is not in the working directory."""
    if settings.driver.name != "subprocess" or "command" in settings.driver.options:
        return None
    read = partial(files_of, settings.worker.app, Path(settings.driver.options.get("cwd") or Path.cwd()))
    if not read():
        return None

    def report(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False, highlight=False)

    return lambda replace: watch_app(
        read, check=lambda: check_app(settings), replace=replace, report=report, clock=SystemClock()
    )


def _greet(settings: Settings, console: Console) -> None:
    console.print(f"osrdyne dev is up: pool [bold]{settings.pool.id}[/bold], API http://127.0.0.1:{settings.api.port}")
    if settings.worker.config.get("datasets"):
        console.print("Try, in another terminal:")
        command = "osrdyne" if shutil.which("osrdyne") else sys.argv[0]
        console.print(
            f"""  {command} call tpch/sf=0.01 /sql -d '{{"query": "select count(*) from lineitem"}}'""",
            soft_wrap=True,
            highlight=False,
        )
    console.print(f"The broker's address, with its password, is in {announcement_file()}", soft_wrap=True)
    if os.environ.get(FILE_VARIABLE) or Path(DEFAULT_FILE).exists():
        hint = "Your configuration file takes precedence: other commands here need --config with that file."
        console.print(hint, soft_wrap=True)
    console.print("Ctrl-C stops everything.")
