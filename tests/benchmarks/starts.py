"""How starts per second are measured, for every backend: fifty groups at once, and the same number started bare.

The benchmark `drivers` has a module for each backend (`starts_…`); this is what they share. It also runs where only
osrdyne is installed: the figures of systemd are taken inside its container.
"""

import asyncio
import secrets
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable

from osrdyne.aio.clock import SystemClock
from osrdyne.drivers.base import Driver, DriverContext, WorkerSpec
from osrdyne.protocol.names import Key
from osrdyne.testing.driver_harness import clean_up, make_spec
from tests.benchmarks.figures import Figure, Goal, Round, figure

GROUPS = 50
COMMAND = ("sleep", "600")
"""The workers do nothing, so that they do not count."""


class NotMeasuredError(Exception):
    """The backend is not here. The text says which one, and what there is no figure of."""


def make_context() -> DriverContext:
    """A pool of its own."""
    pool = f"bench_{secrets.token_hex(4)}"
    return DriverContext(pool=pool, stack="bench.example:5672//", clock=SystemClock(), worker_command=COMMAND)


def make_specs(pool: str) -> list[WorkerSpec]:
    return [make_spec(Key(f"infra={number}"), pool=pool) for number in range(GROUPS)]


async def _start_all(driver: Driver, end: Callable[[Driver], Awaitable[None]]) -> float:
    """Seconds until the driver has answered all of its pool's groups."""
    specs = make_specs(driver.context.pool)
    try:
        began = time.perf_counter()
        await asyncio.gather(*map(driver.start, specs))
        return time.perf_counter() - began
    finally:
        await end(driver)


async def measure(
    make_driver: Callable[[DriverContext], Driver],
    floor: Callable[[], Awaitable[float]],
    *,
    rounds: int,
    end: Callable[[Driver], Awaitable[None]] = clean_up,
) -> list[Round]:
    """Starts a second. `floor` returns the seconds of as many bare starts; `end` ends what a driver has started."""
    measured = []
    for _ in range(rounds):
        ours = GROUPS / await _start_all(make_driver(make_context()), end)
        measured.append(Round(GROUPS / await floor(), ours))
    return measured


def starts_figure(backend: str, rounds: list[Round], *, at_least: float) -> Figure:
    return figure(f"{backend}: {GROUPS} groups at once", "starts/s", rounds, Goal(at_least, at_least=True))


def has_docker_engine() -> bool:
    asked = ["docker", "version"]
    if shutil.which("docker") is None:
        return False
    return subprocess.run(asked, capture_output=True, timeout=60, check=False).returncode == 0
