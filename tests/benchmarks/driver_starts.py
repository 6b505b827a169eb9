"""Starts per second of fifty groups at once, by driver.

The floor is the backend alone: processes by `subprocess.Popen`, containers created and started with the Docker SDK, as
many at once as the driver does. The workers do nothing, so that they do not count. Without a Docker engine there is no
figure of it; the image is that of the conformance suite.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import docker

from osrdyne.aio.clock import SystemClock
from osrdyne.broker.embedded import EmbeddedBroker
from osrdyne.drivers.base import Driver, DriverContext
from osrdyne.drivers.docker import DockerDriver
from osrdyne.drivers.docker_engine import THREADS
from osrdyne.drivers.docker_options import DockerOptions, Pull
from osrdyne.drivers.subprocess import SubprocessDriver
from osrdyne.drivers.subprocess_options import SubprocessOptions
from osrdyne.protocol.names import Key
from osrdyne.testing.driver_conformance import clean_up, make_spec
from tests.benchmarks.figures import Figure, Goal, Round, figure

GROUPS = 50
PROCESS_ROUNDS = 5
CONTAINER_ROUNDS = 1
COMMAND = ("sleep", "600")
IMAGE = "osrdyne-test/conformance"
ROOT = Path(__file__).parents[2]


async def run(_broker: EmbeddedBroker) -> list[Figure]:
    with tempfile.TemporaryDirectory() as directory:
        options = SubprocessOptions(state_directory=directory)
        processes = [await _round(partial(SubprocessDriver, options), _bare_processes) for _ in range(PROCESS_ROUNDS)]
    figures = [figure(f"subprocess: {GROUPS} groups at once", "starts/s", processes, Goal(0.2, at_least=True))]
    if not await asyncio.to_thread(_build_image):
        sys.stderr.write("no Docker engine: starts of containers are not measured\n")
        return figures
    image = DockerOptions(image=IMAGE, command=COMMAND, pull=Pull.NEVER)
    containers = [await _round(partial(DockerDriver, image), _bare_containers) for _ in range(CONTAINER_ROUNDS)]
    return [*figures, figure(f"docker: {GROUPS} groups at once", "starts/s", containers, Goal(0.5, at_least=True))]


async def _round(make_driver: Callable[[DriverContext], Driver], floor: Callable[[], Awaitable[float]]) -> Round:
    """Starts a second."""
    pool = f"bench_{secrets.token_hex(4)}"
    context = DriverContext(pool=pool, stack="bench.example:5672//", clock=SystemClock(), worker_command=COMMAND)
    driver = make_driver(context)
    specs = [make_spec(Key(f"infra={number}"), pool=pool) for number in range(GROUPS)]
    try:
        began = time.perf_counter()
        await asyncio.gather(*map(driver.start, specs))
        ours = time.perf_counter() - began
    finally:
        await clean_up(driver)
    return Round(GROUPS / await floor(), GROUPS / ours)


async def _bare_processes() -> float:
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


async def _bare_containers() -> float:
    """Seconds."""
    client = docker.APIClient(version="auto", max_pool_size=THREADS)

    def start(_number: int) -> str:
        made = client.create_container(IMAGE, list(COMMAND), host_config=client.create_host_config(init=True))
        client.start(made["Id"])
        return str(made["Id"])

    def start_all() -> float:
        with ThreadPoolExecutor(THREADS) as executor:
            began = time.perf_counter()
            started = list(executor.map(start, range(GROUPS)))
            took = time.perf_counter() - began
            list(executor.map(lambda identity: client.remove_container(identity, force=True), started))
        client.close()
        return took

    return await asyncio.to_thread(start_all)


def _build_image() -> bool:
    """False when there is no engine."""
    asked = ["docker", "version"]
    if shutil.which("docker") is None or subprocess.run(asked, capture_output=True, timeout=60, check=False).returncode:
        return False
    command = ["docker", "build", "--quiet", "-f", "tests/docker/conformance.Dockerfile", "-t", IMAGE, "."]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
    return True
