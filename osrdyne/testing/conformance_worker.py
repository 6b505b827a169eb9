"""The worker of the conformance suite, without AMQP and Spark. Its configuration selects its behaviour.

Run as `python -m osrdyne.testing.conformance_worker`. It prints one line of JSON about itself, then `ready`; the suite
reads both with the driver's `logs`. `WORKER_CONFIG`: `{"behaviour": …, "code": …, "lines": …}`, see `Behaviour`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from enum import StrEnum
from types import FrameType

from osrdyne.protocol.environment import WorkerEnvironment

_LIFETIME = 600.0  # Seconds after which a worker ends that a failed test has left.
_JOB = 0.5  # Seconds that a busy worker needs to finish its job.


class Behaviour(StrEnum):
    """What a worker does. `run`: until SIGTERM. `exit`: at once, with `code`, after `lines` lines. `stubborn`: ignores
    SIGTERM. `parent`: of a child that ignores SIGTERM. `silent`: never ready. `busy`: finishes a job after SIGTERM.
    `greedy`: uses all memory once it is ready."""

    RUN = "run"
    EXIT = "exit"
    STUBBORN = "stubborn"
    PARENT = "parent"
    SILENT = "silent"
    BUSY = "busy"
    GREEDY = "greedy"


def main() -> int:
    environment = WorkerEnvironment.from_variables(os.environ)
    behaviour = Behaviour(str(environment.config.get("behaviour", Behaviour.RUN)))
    if behaviour is Behaviour.STUBBORN:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, _finish if behaviour is Behaviour.BUSY else _end)
    child = _start_child() if behaviour is Behaviour.PARENT else None
    print(json.dumps(_report(environment, child)), flush=True)  # noqa: T201 - its output is what the suite reads
    for number in range(int(str(environment.config.get("lines", 0)))):
        print(f"line {number}")  # noqa: T201
    if behaviour is not Behaviour.SILENT:
        print("ready", flush=True)  # noqa: T201
    if behaviour is Behaviour.EXIT:
        return int(str(environment.config.get("code", 0)))
    hoard = []
    while behaviour is Behaviour.GREEDY:
        hoard.append(b"x" * 2**20)
    time.sleep(_LIFETIME)
    return 1


def _end(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


def _finish(_number: int, _frame: FrameType | None) -> None:
    time.sleep(_JOB)
    print("job finished", flush=True)  # noqa: T201
    sys.exit(0)


def _start_child() -> int:
    code = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep({_LIFETIME})"
    child = subprocess.Popen([sys.executable, "-c", code])
    child.returncode = 0  # deliberately not waited for
    return child.pid


def describe(environment: WorkerEnvironment) -> dict[str, object]:
    """The values that the suite compares with the environment in the specification."""
    return {
        "worker_id": environment.worker_id,
        "key": environment.key,
        "pool": environment.pool,
        "queue": environment.requests_queue,
        "paused": environment.paused,
        "uri_sha256": hashlib.sha256(environment.amqp_uri.encode()).hexdigest(),
        "config": dict(environment.config),
    }


def _report(environment: WorkerEnvironment, child: int | None) -> dict[str, object]:
    return {
        **describe(environment),
        "pid": os.getpid(),
        "child": child,
        "arguments": sys.argv,
        "variables": dict(os.environ),
    }


if __name__ == "__main__":
    sys.exit(main())
