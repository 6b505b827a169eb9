"""Removes the AMQP URI from what the application can read. Called by `main` before the application is imported.

The URI stays in the memory of the worker process, which reconnects with it. It is removed from everything that a
handler, a query, Spark's JVM or another process of the same user can read: the file, the environment of the process and
of its children, and `/proc/PID/environ`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

from osrdyne.logs import get_logger
from osrdyne.protocol.environment import STANDARD_INPUT, URI_FILE_VARIABLE, URI_VARIABLE

_DESCRIPTORS = "/dev/fd/"

log = get_logger("credentials")


def leave_environment() -> None:
    """Execute this program again, in the same process, without the URI in its environment.

    Changing `os.environ` is not enough: `/proc/PID/environ` shows the environment that a program was started with, as
    long as it runs. The URI passes through a pipe, which is empty once it is read.
    """
    if URI_VARIABLE not in os.environ or os.environ.get(URI_FILE_VARIABLE) or sys.gettrace() is not None:
        return  # nothing to hide, or a debugger is attached and would lose the program
    source, sink = os.pipe()
    os.write(sink, os.environ.pop(URI_VARIABLE).encode("utf-8", "surrogateescape"))
    os.close(sink)
    os.set_inheritable(source, True)
    variables = {**os.environ, URI_FILE_VARIABLE: f"{_DESCRIPTORS}{source}"}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], variables)


def forget_source(variables: MutableMapping[str, str]) -> None:
    """Remove the source of the URI: the variables, the file, or standard input."""
    variables.pop(URI_VARIABLE, None)
    file = variables.pop(URI_FILE_VARIABLE, None)
    if file == STANDARD_INPUT:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    elif file and file.startswith(_DESCRIPTORS):
        os.close(int(file.removeprefix(_DESCRIPTORS)))
    elif file:
        try:
            Path(file).unlink(missing_ok=True)
        except OSError as error:
            # A platform may have mounted it read-only. The worker can serve, but operators should know.
            log.warning("AMQP URI file cannot be removed", file=file, error=error.strerror)
