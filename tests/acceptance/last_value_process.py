"""The reader of last values as its users run it: `osrdyne last-value` in a process of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from daemon_process import OSRDYNE, PATIENCE, DaemonProcess, own_environment


class LastValueProcess:
    """The reader of one pool's log, with the configuration of its daemon."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._command = [OSRDYNE, "last-value", "-c", str(daemon.config)]
        self._log_file = daemon.directory / "last-value.log"
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Until it is killed at the end; it has logged no traceback then."""
        self._start()
        try:
            yield
            self._assert_runs()
        finally:
            self._kill()
        assert "Traceback" not in self._log_file.read_text()

    def restart(self) -> None:
        """kill -9, and start again."""
        self._assert_runs()
        self._kill()
        self._start()

    def _start(self) -> None:
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=own_environment(), stdout=log, stderr=log)

    def _kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(PATIENCE)

    def _assert_runs(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, self._log_file.read_text()
