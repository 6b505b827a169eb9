"""The reader of last values as its users run it: `osrdyne last-value` in a process of its own."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.acceptance.daemon_process import OSRDYNE, PATIENCE, own_environment


class LastValueProcess:
    """The reader of one pool's log, with this configuration."""

    def __init__(self, config: Path) -> None:
        self._command = [OSRDYNE, "last-value", "-c", str(config)]
        self._log_file = config.with_name("last-value.log")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Until it is killed at the end; it has logged no traceback then."""
        self._start()
        try:
            yield
            self.assert_runs()
        finally:
            self._kill()
        assert "Traceback" not in self._log_file.read_text()

    def restart(self) -> None:
        """kill -9, and start again."""
        self.assert_runs()
        self._kill()
        self._start()

    def _start(self) -> None:
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=own_environment(), stdout=log, stderr=log)

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)

    def assert_runs(self) -> None:
        assert self._process.poll() is None, self._log_file.read_text()
