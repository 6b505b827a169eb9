"""The conformance suite of drivers with pooled workers: the driver starts processes, and the pooled driver places
workers in them.

For the author of a driver, as `driver_conformance`: give `PooledConformance` a fixture `harness` that returns a
`PooledHarness` of your backend. Its processes must run `python -m osrdyne.testing.pooled_process`. They and the tests
exchange messages through sockets in one directory instead of RabbitMQ.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from socket import socket

from osrdyne.drivers.base import Driver, Instance, InstanceState
from osrdyne.drivers.pooled.driver import PooledDriver
from osrdyne.drivers.pooled.link import ProcessLink
from osrdyne.drivers.pooled.placement import PooledRules, ProcessSettings
from osrdyne.drivers.pooled.process import split_id
from osrdyne.drivers.pooled.upkeep import PooledUpkeep
from osrdyne.protocol.control import Generation
from osrdyne.protocol.names import Key, WorkerId
from osrdyne.protocol.pooled import PROCESS_KEY, Question
from osrdyne.testing.driver_conformance import (
    GROUP_CONFIG,
    OTHER_POOL,
    PATIENCE,
    POOL,
    DriverHarness,
    WorkerConformance,
    eventually,
    exited,
    find,
    is_ready,
    make_spec,
)
from osrdyne.testing.pooled import PlayedLink
from osrdyne.testing.pooled_process import MAX_DATAGRAM, SocketNetwork, read_report

RULES = PooledRules(keys_per_process=100, spares=0, max_processes=1, process_timeout=60.0, repeat_after=0.1)
"""One process, so that all drivers of a test use the same one: outside of the suite, a term has only one leader."""

KILLS = 10  # How often the message that ends a worker is sent.


class RunningDriver(PooledDriver):
    """A driver whose upkeep runs until it is closed."""

    def __init__(
        self,
        inner: Driver,
        link: ProcessLink,
        *,
        on_close: Callable[[RunningDriver], None],
        rules: PooledRules = RULES,
    ) -> None:
        super().__init__(inner, rules)
        # The settings of the pool, and of a profile.
        configs: tuple[Mapping[str, object] | None, ...] = (None, GROUP_CONFIG)
        self.use_settings(ProcessSettings(inner.spec_hash(config), rules.spares, config) for config in configs)
        self.begin_term(link)
        self.upkeep = asyncio.ensure_future(PooledUpkeep(self).run())
        self._on_close = on_close

    async def close(self) -> None:
        self.upkeep.cancel()
        with suppress(asyncio.CancelledError):
            await self.upkeep
        self.end_term()
        self._on_close(self)
        await super().close()


class PooledHarness(DriverHarness):
    """Real processes of one backend, and sockets in `directory` instead of RabbitMQ."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        directory.chmod(0o777)  # the processes may have another user
        self.network = SocketNetwork(directory)
        self._sockets: dict[PooledDriver, socket] = {}
        self._bound = 0

    @abstractmethod
    def processes(self, pool: str, *, changed: bool = False) -> Driver:
        """A new driver of the backend, whose workers run `pooled_process` with `PLAYED_NETWORK`. `changed`: with a
        change of its settings that affects workers."""

    @abstractmethod
    async def kill_process(self, process: Instance) -> None:
        """Kill a process from outside, with all its workers."""

    def driver(self, pool: str = POOL, *, changed: bool = False) -> RunningDriver:
        bound = self.network.bind(f"link-{self._bound}")
        self._bound += 1

        def ask(process: WorkerId, question: Question, generation: Generation) -> None:
            self.network.ask(bound, process, question, generation)

        inner = self.processes(pool, changed=changed)
        driver = RunningDriver(inner, PlayedLink(ask, pool=pool), on_close=self._unbind)
        self._sockets[driver] = bound

        def read() -> None:
            with suppress(BlockingIOError):
                while datagram := bound.recv(MAX_DATAGRAM):
                    driver.take_state(*read_report(datagram))

        asyncio.get_running_loop().add_reader(bound, read)
        return driver

    def changed_driver(self) -> RunningDriver:
        return self.driver(changed=True)

    async def kill(self, instance: Instance) -> None:
        found = split_id(instance.instance_id)
        assert found is not None
        bound = next(iter(self._sockets.values()), None) or self.network.bind("killer")
        # A datagram to a busy process is lost. Repetitions have no effect on a worker that has ended.
        for _ in range(KILLS):
            self.network.send(bound, found[0], {"kill": found[1]})
            await asyncio.sleep(0.1)

    def _unbind(self, driver: PooledDriver) -> None:
        bound = self._sockets.pop(driver)
        asyncio.get_running_loop().remove_reader(bound)
        Path(bound.getsockname()).unlink()
        bound.close()

    async def end(self) -> None:
        """End all processes, at the end of a test."""
        for pool in (POOL, OTHER_POOL):
            inner = self.processes(pool)
            for instance in await inner.list_instances():
                await inner.stop(instance.instance_id, grace=0)
                await inner.remove(instance.instance_id)
            await inner.close()


class PooledConformance(WorkerConformance):
    """Tests of drivers that start processes of pooled workers."""

    test_password_is_not_on_the_command_line = None  # type: ignore[assignment]
    """The password of a worker is in a message, not in the environment of a process."""

    async def test_starts_of_a_slot_at_once_give_one_worker(self, driver: Driver, harness: DriverHarness) -> None:
        """In a running process: otherwise drivers of one term would remove the processes that the others start."""
        first = await driver.start(make_spec(slot=1))
        await driver.stop(first.instance_id, grace=0)
        await driver.remove(first.instance_id)
        await super().test_starts_of_a_slot_at_once_give_one_worker(driver, harness)

    async def test_keys_share_one_process_of_the_backend(self, driver: RunningDriver) -> None:
        started = [await driver.start(make_spec(Key(f"key {number}"))) for number in range(5)]
        [process] = await driver.inner.list_instances()
        assert (process.key, process.state, process.exit) == (PROCESS_KEY, InstanceState.RUNNING, None)
        assert {split_id(one.instance_id) for one in started} == {(process.worker_id, one.worker_id) for one in started}
        assert {one.external_id for one in started} == {process.external_id}

    async def test_killed_process_ends_all_its_workers_and_is_never_started_again(
        self, driver: RunningDriver, harness: PooledHarness
    ) -> None:
        """A process that the platform restarts has no record of its workers (lifecycle: pooled-ids-once)."""
        started = [await driver.start(make_spec(Key(f"key {number}"))) for number in range(3)]
        [process] = await driver.inner.list_instances()
        await harness.kill_process(process)
        ends = [await exited(driver, one) for one in started]
        assert all(end.exit is not None and "the process ended" in str(end.exit.reason) for end in ends)
        for end in ends:
            await driver.remove(end.instance_id)
        again = await driver.start(make_spec(Key("key 0")))
        await is_ready(driver, again)
        found = split_id(again.instance_id)
        assert found is not None
        assert found[0] != process.worker_id
        assert [one.worker_id for one in await driver.inner.list_instances()] == [found[0]]

    async def test_process_carries_the_hash_of_its_settings(self, driver: RunningDriver) -> None:
        """The next leader decides by it which keys the process may take."""
        await driver.start(make_spec(spec_hash=driver.spec_hash(GROUP_CONFIG)))
        [process] = await driver.inner.list_instances()
        assert process.spec_hash == driver.inner.spec_hash(GROUP_CONFIG) != driver.inner.spec_hash()

    async def test_next_leader_finds_the_process_and_its_workers(
        self, driver: RunningDriver, harness: PooledHarness
    ) -> None:
        earlier = harness.driver()
        started = await earlier.start(make_spec())
        [process] = await earlier.inner.list_instances()
        await earlier.close()
        assert await driver.list_instances() == [started]
        assert await driver.inner.list_instances() == [process]

    async def test_end_of_a_process_that_no_leader_saw_is_found(
        self, driver: RunningDriver, harness: PooledHarness
    ) -> None:
        earlier = harness.driver()
        started = await earlier.start(make_spec())
        [process] = await earlier.inner.list_instances()
        await earlier.close()
        await harness.kill_process(process)

        async def has_ended() -> bool:
            """Only the process had a record of its workers: a leader that got no report of it lists none."""
            found = await find(driver, started.instance_id)
            return found is None or found.state is InstanceState.EXITED

        await eventually(has_ended, what="the worker is not listed as running")
        await driver.remove(started.instance_id)
        again = await driver.start(make_spec())
        assert again.instance_id != started.instance_id

    async def test_stopped_process_exits_cleanly_and_frees_its_slot(self, driver: RunningDriver) -> None:
        started = await driver.start(make_spec())
        [process] = await driver.inner.list_instances()
        await driver.stop(started.instance_id, grace=PATIENCE)
        await driver.remove(started.instance_id)
        await driver.inner.stop(process.instance_id, grace=PATIENCE)

        async def is_removed() -> bool:
            """The upkeep removes a process once it has no workers."""
            return await driver.inner.list_instances() == []

        await eventually(is_removed, what="the process is removed")
        again = await driver.start(make_spec())
        [successor] = await driver.inner.list_instances()
        assert successor.slot == process.slot
        assert successor.worker_id != process.worker_id
        assert (await find(driver, again.instance_id)) == again
