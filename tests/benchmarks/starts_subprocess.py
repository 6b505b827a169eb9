"""Starts of processes: the floor is `subprocess.Popen`."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from functools import partial

from osrdyne.drivers.subprocess import SubprocessDriver
from osrdyne.drivers.subprocess.options import SubprocessOptions
from tests.benchmarks.figures import Figure
from tests.benchmarks.starts import COMMAND, GROUPS, measure, starts_figure

ROUNDS = 5


async def run() -> Figure:
    with tempfile.TemporaryDirectory() as directory:
        options = SubprocessOptions(state_directory=directory)
        rounds = await measure(partial(SubprocessDriver, options), _bare, rounds=ROUNDS)
    return starts_figure("subprocess", rounds, at_least=0.2)


async def _bare() -> float:
    """Seconds."""

    def start_all() -> float:
        began = time.perf_counter()
        started = [subprocess.Popen(COMMAND, start_new_session=True) for _ in range(GROUPS)]
        took = time.perf_counter() - began
        for process in started:
            process.kill()
            process.wait()
        return took

    return await asyncio.to_thread(start_all)
