"""How a worker process is started, and what it means when it cannot be. Called by `LocalWorkers`; keeps nothing."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from osrdyne.errors import DriverError, DriverUnavailableError, StartFailedError

_REFUSED_FOR_GOOD = frozenset(
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
    """How workers are started: the same for all of a pool. `uri_in_environment`: not in a file."""

    command: tuple[str, ...]
    cwd: str | None
    inherit: tuple[str, ...]
    environment: Mapping[str, str]
    spec_hash: str
    uri_in_environment: bool = False


def spawn(launch: Launch, variables: Mapping[bytes, bytes], *, output: int, lock: int) -> int:
    """Start the process in a session of its own, so that no signal to the daemon reaches it; returns its pid."""
    process = subprocess.Popen(
        launch.command,
        cwd=launch.cwd,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        pass_fds=(lock,),
    )
    # The worker is waited for by its pidfd; this object must neither wait for it nor warn that it was not waited for.
    process.returncode = 0
    return process.pid


def start_error(error: OSError, *, subject: str, option: str) -> DriverError:
    """The error of a start that the system refused: permanent, with the option to correct, or temporary."""
    where = os.fsdecode(error.filename) if error.filename is not None else subject
    message = f"The worker could not be started: {where}: {error.strerror}."
    if error.errno in _REFUSED_FOR_GOOD:
        return StartFailedError(f"{message} Check driver.options.{option}.")
    return DriverUnavailableError(message)
