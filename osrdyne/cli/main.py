"""The `osrdyne` command: builds the Typer application and turns every failure into one sentence and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted (`call` has two more). A
traceback is shown only with `--debug`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from osrdyne import __version__
from osrdyne.cli import groups, poison, routes, splitter, token
from osrdyne.cli.call import call
from osrdyne.cli.check_config import check_config
from osrdyne.cli.dev import dev
from osrdyne.cli.doctor import doctor
from osrdyne.cli.explain import explain
from osrdyne.cli.run import run
from osrdyne.cli.status import status
from osrdyne.errors import (
    BrokerAccessError,
    BrokerConflictError,
    ConfigurationError,
    InvalidKeyError,
    OsrdyneError,
    PortTakenError,
)
from osrdyne.logs import configure_logging, mask_uri

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130

_TO_BE_CHANGED_BY_THE_USER = (
    ConfigurationError,
    InvalidKeyError,
    PortTakenError,
    BrokerAccessError,
    BrokerConflictError,
)

_WORDS_OF_PYDANTIC = {
    "Value error, ": "",
    "Input should": "it should",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    ", unable to parse string as an integer": "",
    ", unable to parse string as a number": "",
}

app = typer.Typer(
    name="osrdyne",
    help="Keyed PySpark workers behind AMQP RPC: the first request for a key starts its worker.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    _debug: Annotated[
        bool, typer.Option("--debug", help="Show a traceback when something unexpected happens.")
    ] = False,
) -> None:
    """Keyed PySpark workers behind AMQP RPC: the first request for a key starts its worker."""
    configure_logging(level="warning")  # standard output is for the answer; `run` sets its own level


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


app.command()(run)
app.command()(dev)
app.command()(call)
app.command("check-config")(check_config)
app.command()(doctor)
app.command()(status)
app.add_typer(groups.app, name="groups")
app.add_typer(poison.app, name="poison")
app.add_typer(routes.app, name="routes")
app.add_typer(splitter.app, name="splitter")
app.add_typer(token.app, name="token")
app.command()(explain)


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point. Ends the process with the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(execute(arguments, debug=arguments[:1] == ["--debug"]))


def execute(arguments: list[str], *, debug: bool) -> int:
    """Run one command and return its exit code; what went wrong is one sentence on standard error."""
    try:
        code = app(arguments, prog_name="osrdyne", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain once more when it closes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        if debug:
            raise
        return _report(error)
    return code if isinstance(code, int) else 0


def _report(error: BaseException) -> int:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, OsrdyneError):
        _say(mask_uri(str(error)))
        return WRONG_USE if isinstance(error, _TO_BE_CHANGED_BY_THE_USER) else FAILED
    if hasattr(error, "format_message"):  # what Typer raises for wrong usage; its class is not public
        _say(_usage(error))
        return WRONG_USE
    _say(f"Unexpected {type(error).__name__}; run `osrdyne --debug …` for the traceback.")
    return FAILED


def _usage(error: Any) -> str:
    """Wrong usage in one or two sentences; empty where Typer has printed the help of a group of commands."""
    message = str(error.format_message()).strip()
    for theirs, ours in _WORDS_OF_PYDANTIC.items():
        message = message.replace(theirs, ours)
    context = getattr(error, "ctx", None)
    if not message or context is None:
        return message
    return f"{message if message.endswith(('.', '?')) else f'{message}.'} Try `{context.command_path} --help`."


def _say(text: str) -> None:
    if text:
        typer.echo(text, err=True)


if __name__ == "__main__":
    main()
