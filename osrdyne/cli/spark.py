"""`osrdyne spark`: what makes Spark workers start faster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from osrdyne.cli.options import ConfigOption, SetOption, load
from osrdyne.config.models import Settings
from osrdyne.errors import ConfigurationError

app = typer.Typer(help="Make Spark workers start faster.", no_args_is_help=True)

_TRAINING = (sys.executable, "-m", "osrdyne_worker.pipelines.training")


@app.callback()
def spark() -> None:
    """Make Spark workers start faster."""


@app.command("warm-archive")
def warm_archive(
    config: ConfigOption = None,
    assignments: SetOption = None,
    directory: Annotated[
        Path | None, typer.Option(help="Where to write it; by default where workers of this user look for it.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Make it again, although there is one.")] = False,
) -> None:
    """Make the class data sharing archive with which workers on this host start Java faster; takes about a minute."""
    settings = load(config, assignments).settings
    arguments = [*(["--directory", str(directory)] if directory else []), *(["--again"] if again else [])]
    done = start_training(settings, *arguments, output=subprocess.PIPE)
    output, errors = done.communicate()
    if done.returncode != 0:
        raise ConfigurationError((errors.strip().splitlines() or ["The training run failed."])[-1])
    typer.echo(output.strip().splitlines()[-1])


def start_training(settings: Settings, *arguments: str, output: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """Start the training run in a process of its own, with the lowest priority: it may run beside workers."""
    return subprocess.Popen(
        ["nice", "-n", "19", *_TRAINING, *arguments],
        env={**os.environ, "WORKER_CONFIG": json.dumps(settings.worker_config())},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        text=True,
    )
