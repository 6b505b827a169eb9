"""The conformance suite on the Docker driver and a real engine, and what happens when the engine is away."""

import tempfile
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from osrdyne.aio.clock import SystemClock
from osrdyne.drivers.base import DriverContext
from osrdyne.drivers.docker import DockerDriver
from osrdyne.drivers.docker.options import DockerOptions
from osrdyne.testing.driver_conformance import POOL, BackendConformance, DriverHarness, WorkerConformance
from osrdyne.testing.pooled_conformance import PooledConformance, PooledHarness
from osrdyne.testing.pooled_process import DIRECTORY_VARIABLE
from tests.chaos.proxy import Proxy
from tests.docker.conftest import docker, remove_containers

SOCKET = "/var/run/docker.sock"
CONTEXT = DriverContext(pool=POOL, stack="broker.example:5672//", clock=SystemClock(), worker_command=())
WORKER = ("python", "-m", "osrdyne.testing.conformance_worker")


class DockerHarness(DriverHarness):
    """Through a proxy of the engine's socket, which can be cut off; no other engine is disturbed."""

    def __init__(self, image, proxy):
        self.options = DockerOptions(image=image, command=WORKER, host=f"tcp://127.0.0.1:{proxy.port}", timeout=60.0)
        self.proxy = proxy

    def driver(self, pool=POOL):
        return DockerDriver(self.options, replace(CONTEXT, pool=pool))

    def changed_driver(self):
        return DockerDriver(self.options.model_copy(update={"environment": {"CHANGED": "1"}}), CONTEXT)

    async def kill(self, instance):
        docker("kill", instance.instance_id)

    @asynccontextmanager
    async def away(self):
        self.proxy.refusing = True
        self.proxy.cut()
        yield
        self.proxy.refusing = False


@pytest.mark.usefixtures("no_leftovers")
class TestDockerDriver(BackendConformance, WorkerConformance):
    @pytest.fixture
    async def harness(self, conformance_image):
        async with Proxy(SOCKET) as proxy:
            yield DockerHarness(conformance_image, proxy)


class PooledDockerHarness(PooledHarness):
    """Processes in containers, which have the directory of the sockets mounted."""

    def __init__(self, image, directory):
        super().__init__(directory)
        self.options = DockerOptions(
            image=image,
            command=("python", "-m", "osrdyne.testing.pooled_process"),
            environment={DIRECTORY_VARIABLE: "/played"},
            mounts=(f"{directory}:/played",),
        )

    def processes(self, pool, *, changed=False):
        more = {"environment": self.options.environment | {"CHANGED": "1"}} if changed else {}
        return DockerDriver(self.options.model_copy(update=more), replace(CONTEXT, pool=pool))

    async def kill_process(self, process):
        docker("kill", process.instance_id)


@pytest.mark.usefixtures("no_leftovers")
class TestPooledDockerDriver(PooledConformance):
    @pytest.fixture
    async def harness(self, conformance_image):
        with tempfile.TemporaryDirectory(prefix="osrdyne-", ignore_cleanup_errors=True) as directory:
            harness = PooledDockerHarness(conformance_image, Path(directory))
            yield harness
            await harness.end()


@pytest.fixture
def no_leftovers():
    """A container that an earlier, killed run left behind must not fail this one."""
    remove_containers(CONTEXT.stack)
