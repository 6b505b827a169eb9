"""The conformance suite on every driver of ours, the fake one included."""

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
from osrdyne.drivers.pooled import placement
from osrdyne.drivers.pooled.process import split_id
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
from osrdyne.testing.pooled import Faults, PlayedLink, PlayedNetwork
from osrdyne.testing.pooled_conformance import PooledConformance, PooledHarness, RunningDriver
from osrdyne.testing.pooled_process import DIRECTORY_VARIABLE

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


class MemoryHarness(DriverHarness):
    """Processes and messages in memory; messages are lost, doubled and reordered."""

    def __init__(self, faults):
        self.backend = FakeBackend()
        self.network = PlayedNetwork(SystemClock(), faults, seed=7)

    def driver(self, pool=POOL, spec_hash="spec"):
        inner = FakeDriver(SystemClock(), pool=pool, backend=self.backend, spec_hash=spec_hash)
        inner.on_start = lambda worker: self.network.start_process(worker.instance.worker_id)
        driver = RunningDriver(inner, PlayedLink(self.network.ask, pool=pool), on_close=self.network.drivers.remove)
        self.network.drivers.append(driver)
        return driver

    def changed_driver(self):
        return self.driver(spec_hash="changed")

    async def kill(self, instance):
        process, worker = split_id(instance.instance_id)
        self.network.processes[process].end_worker(worker)


class TestPooledDriver(DriverConformance):
    @pytest.fixture
    def harness(self):
        return MemoryHarness(Faults(report_interval=0.5))


class TestPooledDriverWithLostMessages(DriverConformance):
    @pytest.fixture
    def harness(self):
        return MemoryHarness(Faults(lost=0.3, doubled=0.2, delay=0.15, report_interval=0.5))


class ProcessHarness(PooledHarness):
    """Processes of the subprocess driver."""

    def __init__(self, directory):
        super().__init__(directory / "n")
        self.options = SubprocessOptions(
            state_directory=str(directory / "state"), environment={DIRECTORY_VARIABLE: str(self.network.directory)}
        )

    def processes(self, pool, *, changed=False):
        command = (sys.executable, "-m", "osrdyne.testing.pooled_process")
        more = {"environment": self.options.environment | {"CHANGED": "1"}} if changed else {}
        context = DriverContext(pool, "localhost:5672//", SystemClock(), command)
        return SubprocessDriver(self.options.model_copy(update=more), context)

    async def kill_process(self, process):
        os.kill(int(process.external_id), signal.SIGKILL)


@pytest.mark.nightly
class TestPooledDriverWithRealProcesses(PooledConformance):
    @pytest.fixture
    async def harness(self, processes, tmp_path, monkeypatch):
        monkeypatch.setattr(placement, "EMPTY_FOR", 1.0)  # seconds; otherwise a test waits for a minute
        harness = ProcessHarness(tmp_path)
        yield harness
        await harness.end()
