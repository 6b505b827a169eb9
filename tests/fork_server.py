"""Starts `osrdyne` in processes that are forked from one that has imported it: 20 ms instead of 2 s of processor time.

The process is a real one, with its own pid, signals, exit code and log. Its command line in the process list is that of
the fork server, and so tests about the process list start the command itself.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

IMPORTED = (
    "osrdyne.api.app",
    "osrdyne.api.server",
    "osrdyne.cli.daemon.run",
    "osrdyne.cli.main",
    "osrdyne.daemon.daemon",
    "osrdyne.drivers.subprocess",
    "osrdyne.drivers.pooled",
    "structlog.dev",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "uvloop",
)

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(IMPORTED))


class ForkedProcess:
    """The part of `subprocess.Popen` that tests of daemons use."""

    def __init__(self, arguments: list[str], *, cwd: Path, env: Mapping[str, str], log: Path) -> None:
        """Run `osrdyne` with these arguments; what it writes is appended to `log`."""
        self._process = _context.Process(target=_run, args=(arguments, str(cwd), dict(env), str(log)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} has not ended within {timeout} s")
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _run(arguments: list[str], cwd: str, env: dict[str, str], log: str) -> None:
    """In the new process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    written = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.close(written)
    sys.argv = ["osrdyne", *arguments]
    from osrdyne.cli.entry import main

    main()
