"""The conformance suite on every driver of ours, the fake one included."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from osrdyne.aio.clock import SystemClock
from osrdyne.drivers.base import DriverContext, DriverOptions
from osrdyne.drivers.noop import NoopDriver
from osrdyne.drivers.subprocess import SubprocessDriver
from osrdyne.drivers.subprocess.options import SubprocessOptions
from osrdyne.testing.conformance_worker import Behaviour
from osrdyne.testing.driver_conformance import (
    POOL,
    BackendConformance,
    DriverConformance,
    DriverContract,
    DriverHarness,
    WorkerConformance,
)
from osrdyne.testing.drivers import FakeBackend, FakeDriver, FakeWorker

pytestmark = pytest.mark.one_rabbitmq

CONTEXT = DriverContext(
    pool=POOL,
    stack="localhost:5672//",
    clock=SystemClock(),
    worker_command=(sys.executable, "-m", "osrdyne.testing.conformance_worker"),
)


class NoopHarness(DriverHarness):
    def driver(self, pool=POOL):
        return NoopDriver(DriverOptions(), replace(CONTEXT, pool=pool))

    def changed_driver(self):
        raise AssertionError("Nothing shapes a worker that is never started.")

    async def kill(self, instance):
        raise AssertionError("There is nothing to kill.")


class TestNoopDriver(DriverContract):
    @pytest.fixture
    def harness(self):
        return NoopHarness()


class FakeHarness(DriverHarness):
    """Workers that exist in memory and follow commands, like the real one of the suite."""

    def __init__(self):
        self.backend = FakeBackend()

    def driver(self, pool=POOL):
        driver = FakeDriver(SystemClock(), pool=pool, backend=self.backend)
        driver.on_start = self._behave
        return driver

    def changed_driver(self):
        driver = self.driver()
        driver.current_spec_hash = "changed"
        return driver

    @asynccontextmanager
    async def away(self):
        self.backend.away = True
        yield
        self.backend.away = False
        self.backend.changed()

    async def kill(self, instance):
        FakeDriver(SystemClock(), backend=self.backend).exit_instance(instance.instance_id, signal="SIGKILL")

    def _behave(self, worker: FakeWorker):
        config = worker.spec.environment.config
        worker.lines += [json.dumps({}), *(f"line {number}" for number in range(config.get("lines", 0))), "ready"]
        worker.stubborn = config["behaviour"] == Behaviour.STUBBORN
        if config["behaviour"] == Behaviour.EXIT:
            FakeDriver(SystemClock(), backend=self.backend).exit_instance(
                worker.instance.instance_id, config.get("code", 0)
            )


class TestFakeDriver(BackendConformance, DriverConformance):
    @pytest.fixture
    def harness(self):
        return FakeHarness()


class SubprocessHarness(DriverHarness):
    def __init__(self, directory):
        self.directory = directory
        self.options = SubprocessOptions(state_directory=str(directory))

    def driver(self, pool=POOL):
        return SubprocessDriver(self.options, replace(CONTEXT, pool=pool))

    def changed_driver(self):
        return SubprocessDriver(self.options, replace(CONTEXT, worker_config={"changed": True}))

    async def kill(self, instance):
        os.kill(int(instance.external_id), signal.SIGKILL)

    @asynccontextmanager
    async def away(self):
        """The state directory is elsewhere, and a file in its place."""
        elsewhere = self.directory.rename(self.directory.with_name("elsewhere"))
        self.directory.touch()
        try:
            yield
        finally:
            self.directory.unlink()
            elsewhere.rename(self.directory)


class TestSubprocessDriver(BackendConformance, WorkerConformance):
    @pytest.fixture
    def harness(self, processes, tmp_path):
        return SubprocessHarness(tmp_path / "state")
