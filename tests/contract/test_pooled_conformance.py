"""The conformance suite on the driver of pooled workers, around the fake driver and around real processes."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

import pytest

pytest.register_assert_rewrite("osrdyne.testing.driver_conformance")

from osrdyne.aio.clock import SystemClock  # noqa: E402
from osrdyne.drivers.base import DriverContext  # noqa: E402
from osrdyne.drivers.pooled.driver import PooledDriver  # noqa: E402
from osrdyne.drivers.pooled.placement import PooledRules  # noqa: E402
from osrdyne.drivers.pooled.process import split_id  # noqa: E402
from osrdyne.drivers.pooled.upkeep import PooledUpkeep  # noqa: E402
from osrdyne.drivers.subprocess import SubprocessDriver  # noqa: E402
from osrdyne.drivers.subprocess.options import SubprocessOptions  # noqa: E402
from osrdyne.testing.driver_conformance import (  # noqa: E402
    OTHER_POOL,
    POOL,
    DriverConformance,
    DriverHarness,
    WorkerConformance,
)
from osrdyne.testing.drivers import FakeBackend, FakeDriver  # noqa: E402
from osrdyne.testing.pooled import Faults, PlayedLink, PlayedNetwork  # noqa: E402
from osrdyne.testing.pooled_process import (  # noqa: E402
    DIRECTORY_VARIABLE,
    MAX_DATAGRAM,
    SocketNetwork,
    read_report,
)

RULES = PooledRules(keys_per_process=100, spares=0, max_processes=1, process_timeout=60.0, repeat_after=0.1)
"""One process, so that rivals of one term meet in it: two leaders of one term do not exist outside of the suite."""


class RunningDriver(PooledDriver):
    """A driver whose upkeep runs until it is closed."""

    def __init__(self, inner, link, *, on_close):
        super().__init__(inner, RULES)
        self.begin_term(link)
        self.upkeep = asyncio.ensure_future(PooledUpkeep(self).run())
        self.on_close = on_close

    async def close(self):
        self.upkeep.cancel()
        with suppress(asyncio.CancelledError):
            await self.upkeep
        self.end_term()
        self.on_close(self)
        await super().close()


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


class ProcessHarness(DriverHarness):
    """Real processes of the subprocess driver, and sockets instead of RabbitMQ."""

    def __init__(self, directory):
        self.network = SocketNetwork(directory / "n")
        self.network.directory.mkdir()
        self.options = SubprocessOptions(
            state_directory=str(directory / "state"), environment={DIRECTORY_VARIABLE: str(self.network.directory)}
        )
        self.sockets = {}

    def inner(self, pool, options=None):
        command = (sys.executable, "-m", "osrdyne.testing.pooled_process")
        context = DriverContext(pool, "localhost:5672//", SystemClock(), command)
        return SubprocessDriver(options or self.options, context)

    def driver(self, pool=POOL, options=None):
        bound = self.network.bind(f"link-{len(list(self.network.directory.iterdir()))}")

        def ask(process, question, generation):
            self.network.ask(bound, process, question, generation)

        driver = RunningDriver(self.inner(pool, options), PlayedLink(ask, pool=pool), on_close=self.unbind)
        self.sockets[driver] = bound

        def read():
            with suppress(BlockingIOError):
                while datagram := bound.recv(MAX_DATAGRAM):
                    driver.take_state(*read_report(datagram))

        asyncio.get_running_loop().add_reader(bound, read)
        return driver

    def unbind(self, driver):
        bound = self.sockets.pop(driver)
        asyncio.get_running_loop().remove_reader(bound)
        Path(bound.getsockname()).unlink()
        bound.close()

    def changed_driver(self):
        changed = self.options.environment | {"CHANGED": "1"}
        return self.driver(options=self.options.model_copy(update={"environment": changed}))

    async def kill(self, instance):
        process, worker = split_id(instance.instance_id)
        bound = next(iter(self.sockets.values()), None) or self.network.bind("killer")
        self.network.send(bound, process, {"kill": worker})

    async def end(self):
        for pool in (POOL, OTHER_POOL):
            inner = self.inner(pool)
            for instance in await inner.list_instances():
                await inner.stop(instance.instance_id, grace=0)
            await inner.close()


class TestPooledDriverWithRealProcesses(WorkerConformance):
    @pytest.fixture
    async def harness(self, tmp_path):
        harness = ProcessHarness(tmp_path)
        yield harness
        await harness.end()

    test_password_is_not_on_the_command_line = None
    """The password of a worker is in a message, not in the environment of a process."""
