"""The hooks of the in-memory driver, and the noop driver's refusal: what the conformance suite does not reach."""

from __future__ import annotations

import asyncio

import pytest

from osrdyne.drivers.base import DriverContext, DriverOptions, InstanceState
from osrdyne.drivers.noop import NoopDriver
from osrdyne.errors import StartFailedError
from osrdyne.testing.driver_conformance import KEY, make_spec
from osrdyne.testing.drivers import FakeDriver


@pytest.fixture
def driver(clock):
    return FakeDriver(clock, pool=make_spec().pool)


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
