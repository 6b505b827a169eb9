"""The options of the subprocess driver, and the places of its files."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from pydantic import Field, field_validator

from osrdyne import user_directories
from osrdyne.config.types import Duration, Size
from osrdyne.drivers.base import DriverContext, DriverOptions
from osrdyne.drivers.shared import RESERVED_PREFIXES, Variables


class SubprocessOptions(DriverOptions):
    """`driver.options` of the subprocess driver."""

    command: tuple[str, ...] | None = Field(
        None, description="Program and arguments of a worker; by default `osrdyne-worker` with `worker.app`."
    )
    cwd: str | None = Field(None, description="Working directory of the workers; the daemon's own by default.")
    environment: Variables = Field(default_factory=dict, description="Further environment variables of the workers.")
    inherit: tuple[str, ...] = Field(
        (),
        description="Further variables of the daemon's environment that workers inherit, such as `AWS_*`.",
    )
    end_with_daemon: bool = Field(
        False,
        description="Workers end when the daemon ends, also if it is killed, as those of `osrdyne dev`; otherwise they "
        "keep running for the next daemon.",
    )
    state_directory: str | None = Field(
        None, description="Directory of locks and records of workers; each stack must have its own."
    )
    log_directory: str | None = Field(
        None, description="Directory of the workers' output; by default in the state directory."
    )
    log_max_bytes: Size = Field(
        10 * 2**20, ge=4096, description="Size at which a worker's log is rotated; checked once a minute."
    )
    log_files: int = Field(3, ge=0, le=100, description="Old log files kept for each slot, beside the current one.")
    log_retention: Duration = Field(
        7 * 86400.0, gt=0, description="How long the logs of a slot without a worker are kept."
    )

    @field_validator("command")
    @classmethod
    def _no_empty_command(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and (not value or not value[0]):
            raise ValueError("give a program, or leave the option out for `osrdyne-worker`")
        if any("\0" in part for part in value or ()):
            raise ValueError("a NUL character cannot be passed to a program")
        return value

    @field_validator("inherit")
    @classmethod
    def _names_of_variables(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*\*?", name) is None:
                raise ValueError(f"{name!r} is not a variable name; write AWS_REGION, or AWS_* for a prefix")
            if name.startswith(RESERVED_PREFIXES):
                raise ValueError(f"{name} is set by osrdyne itself (names in WORKER_* and OSRDYNE_*)")
        return value


def state_directory(options: SubprocessOptions, context: DriverContext) -> Path:
    """The directory of the pool: below that of the option, of systemd (`StateDirectory=`), or of XDG, in this order.

    Except with the option, two stacks with the same pool id on a host have different directories.
    """
    if options.state_directory is not None:
        return Path(options.state_directory).expanduser().absolute() / context.pool
    by_systemd = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    base = Path(by_systemd) if by_systemd else user_directories.state_directory()
    stack = hashlib.sha256(context.stack.encode()).hexdigest()[:8]
    return base.absolute() / f"{context.pool}-{stack}"


def log_directory(options: SubprocessOptions, state: Path) -> Path:
    """The directory of this pool's worker logs, also if several pools have the same option."""
    return state / "logs" if options.log_directory is None else Path(options.log_directory).expanduser() / state.name
