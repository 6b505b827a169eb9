"""The life line of a worker, in a process that stands for the worker."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import os, signal, sys, time
from osrdyne_worker.runtime.lifeline import end_with_daemon
if sys.argv[1] == "stuck":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
end_with_daemon(os.environ, grace=0.1)
assert "WORKER_LIFELINE" not in os.environ
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def lifeline():
    ends = list(os.pipe())
    yield ends
    for end in ends:
        os.close(end)


def start(how: str, value: str, descriptor: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, how],
        env={**os.environ, "WORKER_LIFELINE": value},
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(descriptor,),
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.stdout.close()
    return process


@pytest.mark.proves("workers/dev-killed")
@pytest.mark.parametrize(("how", "number"), [("ready", signal.SIGTERM), ("stuck", signal.SIGKILL)])
def test_worker_ends_with_its_daemon(lifeline, how, number):
    process = start(how, str(lifeline[0]), lifeline[0])
    assert process.poll() is None
    os.close(lifeline.pop())
    assert process.wait(60) == -number


@pytest.mark.parametrize("value", ["", "x", "987654", "1"])
def test_variable_that_names_no_pipe_is_ignored(value):
    with Path(os.devnull).open("wb") as null:
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER.replace("600", "0.5"), "ready"],
            env={**os.environ, "WORKER_LIFELINE": value},
            stdout=null,
        )
    assert process.wait(60) == 0
