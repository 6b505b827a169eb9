"""The conformance suite on the driver of pooled workers, around the fake driver and around real processes."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from osrdyne.aio.clock import SystemClock
from osrdyne.drivers.base import DriverContext
from osrdyne.drivers.pooled import placement
from osrdyne.drivers.pooled.process import split_id
from osrdyne.drivers.subprocess import SubprocessDriver
from osrdyne.drivers.subprocess.options import SubprocessOptions
from osrdyne.testing.driver_conformance import POOL, DriverConformance, DriverHarness
from osrdyne.testing.drivers import FakeBackend, FakeDriver
from osrdyne.testing.pooled import Faults, PlayedLink, PlayedNetwork
from osrdyne.testing.pooled_conformance import PooledConformance, PooledHarness, RunningDriver
from osrdyne.testing.pooled_process import DIRECTORY_VARIABLE

pytestmark = pytest.mark.one_rabbitmq


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
