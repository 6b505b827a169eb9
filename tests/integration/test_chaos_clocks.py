"""The wrong clocks of the fault suite: they reach the program that is started with them, and nothing else of it."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from tests.chaos.clocks import WrongClock

PROGRAM = """
import sys, time
print(sys.argv[1:], __name__, flush=True)
for _ in sys.stdin:
    print(time.time(), time.monotonic(), flush=True)
"""


def test_program_sees_each_shift_in_its_wall_clock_only(tmp_path: Path) -> None:
    clock, program = WrongClock(tmp_path / "clock"), tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [*clock.launcher, str(program), "a", "-b"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "['a', '-b'] __main__\n"
        offsets = []
        for shift in (0.0, 3600.0, 90.0, -3600.0, -90.0, -7200.0):
            clock.shift(shift)
            print(file=process.stdin, flush=True)
            wall, monotonic = map(float, process.stdout.readline().split())
            offsets.append(round((wall - time.time()) / 30) * 30)
            assert abs(monotonic - time.monotonic()) < 30
    assert offsets == [0, 3600, 3690, 90, 0, -7200]
