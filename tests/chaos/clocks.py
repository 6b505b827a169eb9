"""Wall clocks that can be set wrong: run as a program, it runs another one whose `time.time()` is off.

    clocks.py FILE PROGRAM ARGUMENTS…

FILE holds by how many seconds, and is read each time. The monotonic clock stays right, as that of a machine does whose
time is corrected. The product has no switch for this.
"""

import os
import runpy
import sys
import time
from pathlib import Path

_WIDTH = 32
"""Bytes that are always there, so that one write replaces them all."""


class WrongClock:
    """The clock of the programs that were started with its `launcher`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0.0
        self.shift(0.0)

    @property
    def launcher(self) -> list[str]:
        """The beginning of a command."""
        return [sys.executable, __file__, str(self._file)]

    def shift(self, seconds: float) -> None:
        """Put the clock forward, or with a negative number back. Shifts add up."""
        self._offset += seconds
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, f"{self._offset:{_WIDTH}.3f}".encode(), 0)
        finally:
            os.close(descriptor)


def _run_with_wrong_clock(file: str, *program: str) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    right_time = time.time

    def wrong_time() -> float:
        return right_time() + float(os.pread(descriptor, _WIDTH, 0))

    time.time = wrong_time
    sys.argv = [*program]
    sys.path[0] = str(Path(program[0]).parent)  # as if it had been started by itself
    runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    _run_with_wrong_clock(*sys.argv[1:])
