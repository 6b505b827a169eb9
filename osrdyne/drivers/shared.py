"""Shared parts of drivers: the option `environment`, a directory of the daemon's own, names of signals."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from osrdyne.errors import DriverUnavailableError

RESERVED_PREFIXES = ("WORKER_", "OSRDYNE_")

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def _passable(variables: dict[str, str]) -> dict[str, str]:
    for name, value in variables.items():
        if name.startswith(RESERVED_PREFIXES):
            raise ValueError(f"{name} is set by osrdyne itself (names in WORKER_* and OSRDYNE_*)")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"{name!r} cannot be passed to a program")
    return variables


def _named_as_in_a_shell(variables: dict[str, str]) -> dict[str, str]:
    for name in variables:
        if not _IDENTIFIER.match(name):
            raise ValueError(
                f"{name!r} is not a variable name: use letters, digits and `_`, not beginning with a digit"
            )
    return variables


Variables = Annotated[dict[str, str], AfterValidator(_passable)]
"""Environment variables; names that osrdyne sets itself are refused."""

ShellVariables = Annotated[Variables, AfterValidator(_named_as_in_a_shell)]
"""The same for a backend that accepts only names that are valid in a shell."""


def prepare_directory(path: Path, *, remedy: str) -> None:
    """Create a directory that only this user can write to. Blocks.

    Raises `DriverUnavailableError`, with the remedy, for an existing one of another user or that others can write to,
    and `OSError`.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise DriverUnavailableError(f"The directory {path} belongs to, or can be written by, another user. {remedy}")


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGKILL; the number for one without a name, as most real-time signals are."""
    return signal.Signals(number).name if number in set(signal.Signals) else str(number)
