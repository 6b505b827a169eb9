"""Starts a worker process, and translates the errors of starts. Called by `LocalWorkers`; without state."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from osrdyne.errors import DriverError, DriverUnavailableError, StartFailedError
from osrdyne.protocol.environment import LIFELINE_VARIABLE

_PERMANENT_ERRORS = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EACCES,
        errno.EPERM,
        errno.ENOEXEC,
        errno.E2BIG,
        errno.ELOOP,
        errno.ENAMETOOLONG,
    }
)


@dataclass(frozen=True, slots=True)
class Launch:
    """The settings of starts, which all workers of a pool share. `uri_in_environment`: the AMQP URI is in no file.
    `lifeline`: a file descriptor for the workers, whose end means that the daemon has ended."""

    command: tuple[str, ...]
    cwd: str | None
    inherit: tuple[str, ...]
    environment: Mapping[str, str]
    spec_hash: str
    uri_in_environment: bool = False
    lifeline: int | None = None


def spawn(launch: Launch, variables: Mapping[bytes, bytes], *, output: int, lock: int) -> int:
    """Start the process in a session of its own, so that no signal to the daemon reaches it; returns its pid."""
    passed: tuple[int, ...] = (lock,)
    if launch.lifeline is not None:
        passed = (lock, launch.lifeline)
        variables = {**variables, LIFELINE_VARIABLE.encode(): str(launch.lifeline).encode()}
    process = subprocess.Popen(
        launch.command,
        cwd=launch.cwd,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        pass_fds=passed,
    )
    # The driver reaps the worker by its pidfd. With a return code, this object does not, and does not warn about it.
    process.returncode = 0
    return process.pid


def start_error(error: OSError, *, subject: str, option: str) -> DriverError:
    """The error of a start that the system refused: permanent with the option to correct, or temporary."""
    where = os.fsdecode(error.filename) if error.filename is not None else subject
    message = f"The worker could not be started: {where}: {error.strerror}."
    if error.errno in _PERMANENT_ERRORS:
        return StartFailedError(f"{message} Check driver.options.{option}.")
    return DriverUnavailableError(message)
