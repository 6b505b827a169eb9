"""The life line of a worker: a pipe whose other end its daemon holds. Its end means that the daemon has ended.

Only workers of a daemon that wants it have one, such as those of `osrdyne dev`; those of `osrdyne run` outlive their
daemon. Called by `main`.
"""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import MutableMapping

from osrdyne.logs import get_logger
from osrdyne.protocol.environment import LIFELINE_VARIABLE

GRACE = 10.0
"""Seconds from the end of the life line to SIGKILL. Shorter than `stop_grace`: RabbitMQ of
`osrdyne dev` has ended as well."""


def end_with_daemon(variables: MutableMapping[str, str], *, grace: float = GRACE) -> None:
    """End this process and its JVM when the life line ends, if there is one. Removes it from the variables."""
    given = variables.pop(LIFELINE_VARIABLE, "")
    if not given.isdigit():
        return
    descriptor = int(given)
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        return  # the variable came from elsewhere
    if is_pipe:
        os.set_inheritable(descriptor, False)
        # A thread and not the event loop, which a handler may block.
        threading.Thread(target=_follow, args=(descriptor, grace), name="life line", daemon=True).start()


def _follow(descriptor: int, grace: float) -> None:
    while os.read(descriptor, 1):
        pass  # the daemon writes nothing
    get_logger("worker").warning("the daemon has ended, and this worker ends with it")
    # As a stop: requests return to their queue if RabbitMQ is still there. The JVM ends with its standard input.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
