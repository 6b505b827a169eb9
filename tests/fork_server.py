"""Starts `osrdyne` and workers in processes that are forked from one that has imported them: 20 ms instead of 2 s of
processor time for a daemon, and 0.4 s for a worker.

The process is a real one, with its own pid, signals, exit code and log. Its command line in the process list is that of
the fork server, and so tests about the process list start the command itself.
"""

import asyncio
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

IMPORTED = (
    "osrdyne.api.app",
    "osrdyne.api.server",
    "osrdyne.cli.daemon.run",
    "osrdyne.cli.main",
    "osrdyne.daemon.daemon",
    "osrdyne.drivers.subprocess",
    "osrdyne.drivers.pooled",
    "osrdyne_worker.main",
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


class ForkedWorker:
    """The part of `asyncio.subprocess.Process` that tests of workers use."""

    def __init__(self, process: BaseProcess, stderr: asyncio.StreamReader) -> None:
        assert process.pid is not None
        self._process, self.pid, self.stderr = process, process.pid, stderr
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(process.sentinel, self._end)

    @classmethod
    async def start(cls, app: str, *, cwd: Path, env: Mapping[str, str], standard_input: bytes) -> "ForkedWorker":
        """Run `osrdyne-worker APP`. The input is at most what a pipe holds."""
        source, sink = os.pipe()
        os.write(sink, standard_input)
        os.close(sink)
        errors, written = os.pipe()
        pipes = Connection(source, writable=False), Connection(written, readable=False)
        process = _context.Process(target=_run_worker, args=(app, str(cwd), dict(env), *pipes))
        process.start()
        for pipe in pipes:
            pipe.close()
        stderr = asyncio.StreamReader()
        reading = asyncio.StreamReaderProtocol(stderr)
        await asyncio.get_running_loop().connect_read_pipe(lambda: reading, os.fdopen(errors, "rb", 0))
        return cls(process, stderr)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self.returncode = self._process.exitcode
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run_worker(
    app: str, cwd: str, env: dict[str, str], standard_input: Connection, standard_error: Connection
) -> None:
    """In the new process."""
    _become(cwd, env)
    os.dup2(standard_input.fileno(), 0)
    os.dup2(standard_error.fileno(), 2)
    standard_input.close()
    standard_error.close()
    sys.argv = ["osrdyne-worker", app]
    from osrdyne_worker.main import main

    main()


def _become(cwd: str, env: dict[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)


def _run(arguments: list[str], cwd: str, env: dict[str, str], log: str) -> None:
    """In the new process."""
    _become(cwd, env)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    written = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.close(written)
    sys.argv = ["osrdyne", *arguments]
    from osrdyne.cli.entry import main

    main()
