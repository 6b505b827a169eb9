"""`osrdyne spark …`: commands that make Spark workers start faster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from osrdyne.cli.options import ConfigOption, KeyArgument, SetOption, load
from osrdyne.config.models import Settings
from osrdyne.errors import ConfigurationError
from osrdyne.protocol.environment import ESCAPED_KEY_VARIABLE
from osrdyne.protocol.names import encode_key, parse_key

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
        Path | None,
        typer.Option(metavar="DIRECTORY", help="Where to write it. Default: where workers of this user find it."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Replace an existing archive.")] = False,
) -> None:
    """Create the class data sharing archive with which workers on this host start Java faster. Takes about a minute."""
    settings = load(config, assignments).settings
    arguments = [*(["--directory", str(directory)] if directory else []), *(["--again"] if again else [])]
    typer.echo(_output_of(_start(settings, (*_TRAINING, *arguments), output=subprocess.PIPE)).splitlines()[-1])


@app.command("infer-columns")
def infer_columns(key: KeyArgument, config: ConfigOption = None, assignments: SetOption = None) -> None:
    """Print the columns of a key's views, for `columns` in the configuration: workers then open the views faster."""
    settings = load(config, assignments).settings
    program = (sys.executable, "-m", "osrdyne_worker.pipelines.infer")
    # Escaped, because neither a variable nor an argument can hold every key.
    variables = {ESCAPED_KEY_VARIABLE: encode_key(parse_key(key))}
    typer.echo(_output_of(_start(settings, program, output=subprocess.PIPE, variables=variables)))


def _output_of(process: subprocess.Popen[str]) -> str:
    """The output of a program. Raises `ConfigurationError` with its last line if it fails."""
    try:
        output, errors = process.communicate()
    except BaseException:  # Ctrl-C: a training run has a process group of its own
        process.terminate()
        process.wait()
        raise
    if process.returncode != 0:
        raise ConfigurationError((errors.strip().splitlines() or ["The program of the worker failed."])[-1])
    return output.strip()


def start_training(settings: Settings) -> subprocess.Popen[str]:
    """Start the training run in the background, with the lowest priority because workers run at the same time."""
    return _start(settings, ("nice", "-n", "19", *_TRAINING), output=subprocess.DEVNULL)


def _start(
    settings: Settings, command: Sequence[str], *, output: int, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env={**os.environ, **(variables or {}), "WORKER_CONFIG": json.dumps(settings.worker_config())},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        text=True,
    )
