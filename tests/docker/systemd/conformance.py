"""The conformance suite on the systemd driver. Run inside the container, by `test_systemd`, not from outside.

`SYSTEMD_MANAGER` and `SYSTEMD_BUS` are the driver's options. Workers are instances of the shipped unit, with another
program in it.
"""

import os
import secrets
import subprocess
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.register_assert_rewrite("osrdyne.testing.driver_conformance", "osrdyne.testing.pooled_conformance")

from osrdyne.aio.clock import SystemClock  # noqa: E402
from osrdyne.drivers.base import DriverContext  # noqa: E402
from osrdyne.drivers.systemd import SystemdDriver  # noqa: E402
from osrdyne.drivers.systemd.options import SystemdOptions  # noqa: E402
from osrdyne.testing.driver_conformance import BackendConformance, WorkerConformance  # noqa: E402
from osrdyne.testing.driver_harness import POOL, DriverHarness, clean_up  # noqa: E402
from osrdyne.testing.pooled_conformance import PooledConformance, PooledHarness  # noqa: E402
from osrdyne.testing.pooled_process import DIRECTORY_VARIABLE  # noqa: E402

MANAGER, BUS = os.environ["SYSTEMD_MANAGER"], os.environ["SYSTEMD_BUS"]
OPTIONS = SystemdOptions(template="osrdyne-worker-conformance", manager=MANAGER, bus=BUS)
APP = "conformance:app"
WORKER = {"worker_command": ("osrdyne-worker", APP), "worker_app": APP}
CONTEXT = DriverContext(pool=POOL, stack="localhost:5672//", clock=SystemClock(), **WORKER)


def kill(instance):
    subprocess.run(["systemctl", f"--{MANAGER}", "kill", "--signal=KILL", instance.external_id], check=True)


class SystemdHarness(DriverHarness):
    def driver(self, pool=POOL):
        return SystemdDriver(OPTIONS, replace(CONTEXT, pool=pool))

    def changed_driver(self):
        return SystemdDriver(OPTIONS.model_copy(update={"environment": {"NEW": "1"}}), CONTEXT)

    async def kill(self, instance):
        kill(instance)

    @asynccontextmanager
    async def away(self):
        """Without D-Bus; only root can do this, and only a driver that may not use systemctl instead notices."""
        units = ["dbus.socket", "dbus.service"]
        subprocess.run(["systemctl", "stop", *units], check=True)
        try:
            yield
        finally:
            subprocess.run(["systemctl", "start", *units], check=True)


class TestSystemdDriver(WorkerConformance):
    @pytest.fixture
    def harness(self):
        return SystemdHarness()


class PooledSystemdHarness(PooledHarness):
    """Processes as instances of a unit that may write to the directory of the sockets."""

    def processes(self, pool, *, changed=False):
        variables = {DIRECTORY_VARIABLE: str(self.network.directory)} | ({"NEW": "1"} if changed else {})
        options = OPTIONS.model_copy(update={"template": "osrdyne-worker-pooled", "environment": variables})
        return SystemdDriver(options, replace(CONTEXT, pool=pool))

    async def kill_process(self, process):
        kill(process)


class TestPooledSystemdDriver(PooledConformance):
    @pytest.fixture
    async def harness(self):
        harness = PooledSystemdHarness(Path("/played") / secrets.token_hex(4))
        yield harness
        await harness.end()


class TestWithoutDbus(BackendConformance):
    @pytest.fixture
    def harness(self):
        return SystemdHarness()

    @pytest.fixture
    async def driver(self, harness):
        driver = harness.driver()
        yield driver
        await clean_up(driver)
