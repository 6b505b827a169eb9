"""The hooks of the in-memory driver, and the noop driver's refusal: what the conformance suite does not reach."""

from __future__ import annotations

import asyncio

import pytest

from osrdyne.drivers.base import DriverContext, DriverOptions, InstanceState
from osrdyne.drivers.noop import NoopDriver
from osrdyne.errors import DriverUnavailableError, StartFailedError
from osrdyne.testing.driver_conformance import KEY, make_spec
from osrdyne.testing.drivers import FakeDriver


@pytest.fixture
def driver(clock):
    return FakeDriver(clock, pool=make_spec().pool)


async def test_failed_call_leaves_nothing_and_the_next_one_works(driver):
    driver.fail_next_list(DriverUnavailableError("gone"))
    with pytest.raises(DriverUnavailableError):
        await driver.list_instances()
    driver.fail_next_start(StartFailedError("no such image"))
    with pytest.raises(StartFailedError):
        await driver.start(make_spec())
    assert await driver.list_instances() == []
    assert await driver.start(make_spec()) in await driver.list_instances()


async def test_hanging_starts_create_nothing_until_released(driver, clock):
    driver.hang_starts()
    async with asyncio.TaskGroup() as group:
        for slot in range(3):
            group.create_task(driver.start(make_spec(slot=slot)), name=f"start {slot}")
        await clock.settle()
        assert (driver.starts_under_way, await driver.list_instances()) == (3, [])
        driver.release_starts()
    assert (driver.most_starts_under_way, len(driver.workers_of(KEY))) == (3, 3)


@pytest.mark.proves("reference-defects/11-reconnection-restarted-every")
async def test_stubborn_worker_is_killed_after_the_grace(driver, clock):
    instance = await driver.start(make_spec())
    [worker] = driver.workers_of(KEY)
    worker.stubborn = True
    async with asyncio.TaskGroup() as group:
        group.create_task(driver.stop(instance.instance_id, grace=30.0), name="stop")
        await clock.advance(29.9)
        assert worker.instance.state is InstanceState.STOPPING
        await clock.advance(0.1)
    assert worker.instance.exit.signal == "SIGKILL"


async def test_noop_refuses_to_start_and_names_the_remedy(clock):
    noop = NoopDriver(DriverOptions(), DriverContext(pool="p", stack="s", clock=clock, worker_command=()))
    with pytest.raises(StartFailedError, match="osrdyne groups env KEY"):
        await noop.start(make_spec())
