"""Starts per second of fifty groups at once, by driver, beside the backend alone.

A backend that is not here is named on stderr, and there is no figure of it. The floor of the subprocess driver is
`subprocess.Popen`; the others have modules of their own.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from functools import partial

from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.drivers.subprocess import SubprocessDriver
from osrdyne.drivers.subprocess.options import SubprocessOptions
from tests.benchmarks import starts_docker, starts_kubernetes, starts_systemd
from tests.benchmarks.figures import Figure
from tests.benchmarks.starts import COMMAND, GROUPS, NotMeasuredError, measure, starts_figure

ROUNDS = 5


async def run(_broker: EmbeddedBroker) -> list[Figure]:
    figures = []
    for measured in (_processes, starts_docker.run, starts_systemd.run, starts_kubernetes.run):
        try:
            figures.append(await measured())
        except NotMeasuredError as reason:
            sys.stderr.write(f"{reason}\n")
    return figures


async def _processes() -> Figure:
    with tempfile.TemporaryDirectory() as directory:
        make_driver = partial(SubprocessDriver, SubprocessOptions(state_directory=directory))
        rounds = await measure(make_driver, partial(asyncio.to_thread, _bare_processes), rounds=ROUNDS)
    return starts_figure("subprocess", rounds, at_least=0.2)


def _bare_processes() -> float:
    """Seconds."""
    began = time.perf_counter()
    started = [subprocess.Popen(COMMAND, start_new_session=True) for _ in range(GROUPS)]
    took = time.perf_counter() - began
    for process in started:
        process.kill()
        process.wait()
    return took
