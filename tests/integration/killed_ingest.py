"""Kills a worker before each operation on files: `python killed_ingest.py DIRECTORY` makes a table for each.

Prints how many tables there are. Each one has the offsets 0 to 9. A worker that stores the offsets 10 to 19 and then
merges the files of closed hours was killed before its first operation, its second, and so on; that of the last table
has ended. Each commit writes a checkpoint.
"""

import os
import shutil
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

from stored_telemetry import compact, ingest

from osrdyne_worker.pipelines.telemetry import table as tables
from osrdyne_worker.pipelines.telemetry.delta_log import DeltaLog
from osrdyne_worker.pipelines.telemetry.table import Table

OPERATIONS = {"open", "os.mkdir", "os.link", "os.rename", "os.remove", "os.listdir", "os.scandir"}
STEP = 270_000
"""Milliseconds between messages: ten of them are in one hour, and the next ten are in two."""


def kill_before(operation: int, directory: Path) -> None:
    """Kill this process before an operation on files in the directory, counted from 1."""
    left = operation

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in OPERATIONS and str(arguments[0]).startswith(str(directory)):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def main(root: Path) -> None:
    tables.CHECKPOINT_INTERVAL = 1
    os.fsync = lambda descriptor: None  # the computer goes on
    first = root / "first"
    ingest(Table(first), end=10, step=STEP)
    for number in count(1):
        directory = root / str(number)
        shutil.copytree(first, directory)
        child = os.fork()
        if child == 0:
            kill_before(number, directory)
            table = Table(directory)
            ingest(table, end=20, step=STEP)
            DeltaLog(table).publish()
            compact(table)
            DeltaLog(table).publish()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            print(number)
            return
        assert os.WTERMSIG(status) == signal.SIGKILL


if __name__ == "__main__":
    main(Path(sys.argv[1]))
