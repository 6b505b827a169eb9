"""Shared parts of drivers: the option `environment`, and a directory of the daemon's own."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from osrdyne.errors import DriverUnavailableError

RESERVED_PREFIXES = ("WORKER_", "OSRDYNE_")

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def _usable(variables: dict[str, str]) -> dict[str, str]:
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


# Environment variables, without those that are osrdyne's own.
Variables = Annotated[dict[str, str], AfterValidator(_usable)]

# The same for a backend that takes no other names than a shell does.
ShellVariables = Annotated[Variables, AfterValidator(_named_as_in_a_shell)]


def prepare_directory(path: Path, *, remedy: str) -> None:
    """Create the directory; refuse one that another user owns or could write to. Blocks; raises `OSError` as well."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise DriverUnavailableError(f"The directory {path} belongs to, or can be written by, another user. {remedy}")
