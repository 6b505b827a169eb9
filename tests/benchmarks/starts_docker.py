"""Starts of containers: the floor is their creation and start with the Docker SDK, as many at once as the driver does.

The image is that of the conformance suite.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import docker

from osrdyne.drivers.docker import DockerDriver
from osrdyne.drivers.docker.engine import THREADS
from osrdyne.drivers.docker.options import DockerOptions, Pull
from tests.benchmarks.figures import Figure
from tests.benchmarks.starts import COMMAND, GROUPS, NotMeasuredError, has_docker_engine, measure, starts_figure
from tests.docker.conftest import build_image

ROUNDS = 1
IMAGE = "osrdyne-test/conformance"


async def run() -> Figure:
    if not await asyncio.to_thread(has_docker_engine):
        raise NotMeasuredError("no Docker engine: starts of containers are not measured")
    await asyncio.to_thread(build_image, "tests/docker/conformance.Dockerfile", IMAGE)
    options = DockerOptions(image=IMAGE, command=COMMAND, pull=Pull.NEVER)
    return starts_figure("docker", await measure(partial(DockerDriver, options), _bare, rounds=ROUNDS), at_least=0.5)


async def _bare() -> float:
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
