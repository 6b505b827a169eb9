"""The `osrdyne` command: builds the Typer application, and reports every failure as one sentence and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted (`call` has two more). A traceback is
shown only with `--debug`.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from osrdyne import __version__
from osrdyne.errors import (
    BrokerAccessError,
    BrokerConflictError,
    ConfigurationError,
    InvalidKeyError,
    OsrdyneError,
    PortTakenError,
)

FAILED, USAGE_ERROR, INTERRUPTED = 1, 2, 130
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_USAGE_ERRORS = (
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

# Module and attribute of each command. A module is imported only if its command is used, or for the help of all
# commands: each import takes a part of a second.
_COMMANDS = {
    name: (f"osrdyne.cli.{module}", attribute)
    for name, module, attribute in (
        ("run", "daemon.run", "run"),
        ("dev", "daemon.dev", "dev"),
        ("call", "requests.call", "call"),
        ("check-config", "daemon.check_config", "check_config"),
        ("doctor", "daemon.doctor", "doctor"),
        ("status", "daemon.status", "status"),
        ("groups", "pool.groups", "app"),
        ("workers", "pool.workers", "app"),
        ("poison", "requests.poison", "app"),
        ("routes", "manifests.routes", "app"),
        ("splitter", "manifests.splitter", "app"),
        ("profiles", "manifests.profiles", "app"),
        ("policies", "manifests.policies", "app"),
        ("quota", "pool.quota", "app"),
        ("circuits", "pool.circuits", "app"),
        ("queues", "pool.queues", "app"),
        ("audit", "access.audit", "audit"),
        ("token", "access.token", "app"),
        ("credentials", "access.credentials", "app"),
        ("spark", "daemon.spark", "app"),
        ("explain", "requests.explain", "explain"),
        ("capacity", "pool.capacity", "capacity"),
        ("lag", "pool.lag", "lag"),
        ("telemetry", "telemetry.app", "app"),
        ("last", "telemetry.last_values", "last"),
        ("last-value", "telemetry.last_values", "run"),
    )
}


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


def _options(
    context: typer.Context,
    _debug: Annotated[bool, typer.Option("--debug", help="Show a traceback for unexpected errors.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Keyed PySpark workers behind AMQP RPC: the first request for a key starts its worker."""
    if context.invoked_subcommand != "version":  # which logs nothing
        from osrdyne.logs import configure_logging

        configure_logging(level="warning")  # standard output is for the answer; `run` sets its own level


def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def command_line(chosen: str | None) -> typer.Typer:
    """The command line with the command `chosen`, or with all commands if `chosen` is not a command."""
    application = typer.Typer(
        name="osrdyne",
        help="Keyed PySpark workers behind AMQP RPC: the first request for a key starts its worker.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    application.callback()(_options)
    application.command()(version)
    for name in [chosen] if chosen in _COMMANDS else [] if chosen in {"version", "--version"} else _COMMANDS:
        module, attribute = _COMMANDS[name]
        command = getattr(import_module(module), attribute)
        if isinstance(command, typer.Typer):
            application.add_typer(command, name=name)
        else:
            application.command(name)(command)
    return application


@cache
def full_command_line() -> typer.Typer:
    """The command line with all commands."""
    return command_line(None)


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point. Exits with the code of the command."""
    # None: closed by the caller (`>&-`). Another file would get its descriptor.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 — until the process ends
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(execute(arguments, debug=arguments[:1] == ["--debug"]))


def execute(arguments: list[str], *, debug: bool) -> int:
    """Run one command and return its exit code. An error is one sentence on standard error."""
    try:
        chosen = next((argument for argument in arguments if argument != "--debug"), None)
        code = command_line(chosen)(arguments, prog_name="osrdyne", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return FAILED
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.errno in _NO_ROOM and error.filename is None:
            _discard_output()
            _print_error(f"The output, or a file of the command, cannot be written: {error.strerror}.")
            return FAILED
        return _report(error, arguments)
    return code if isinstance(code, int) else 0


def _discard_output() -> None:
    """Write to nowhere what is buffered: its reader has closed the pipe, or there is no room. Python would report the
    error again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: BaseException, arguments: Sequence[str]) -> int:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, OsrdyneError):
        from osrdyne.logs import mask_uri

        _print_error(mask_uri(str(error)))
        return USAGE_ERROR if isinstance(error, _USAGE_ERRORS) else FAILED
    if hasattr(error, "format_message"):  # what Typer raises for wrong usage; its class is not public
        _print_error(_usage(error))
        return USAGE_ERROR
    if (
        isinstance(error, UnicodeEncodeError)
        and (invalid := next(filter(_has_surrogates, arguments), None)) is not None
    ):
        _print_error(f"The argument {invalid!r} is not valid UTF-8.")
        return USAGE_ERROR
    place = f" ({error.filename}: {error.strerror})" if isinstance(error, OSError) and error.filename else ""
    _print_error(f"Unexpected {type(error).__name__}{place}; run `osrdyne --debug …` for the traceback.")
    return FAILED


def _has_surrogates(argument: str) -> bool:
    """Whether an argument has bytes that are not UTF-8, which Python reads as surrogates."""
    return any("\ud800" <= character <= "\udfff" for character in argument)


def _usage(error: Any) -> str:
    """A usage error in one or two sentences; empty if Typer has printed the help of a group of commands."""
    message = str(error.format_message()).strip()
    for theirs, ours in _WORDS_OF_PYDANTIC.items():
        message = message.replace(theirs, ours)
    context = getattr(error, "ctx", None)
    if not message or context is None:
        return message
    if message.startswith("Got unexpected extra argument") and context.info_name == "check-config":
        message = "The configuration file is given with --config FILE, not as an argument"
    return f"{message if message.endswith(('.', '?')) else f'{message}.'} Try `{context.command_path} --help`."


def _print_error(text: str) -> None:
    if text:
        typer.echo(text, err=True)


if __name__ == "__main__":
    main()
