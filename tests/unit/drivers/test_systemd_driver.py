"""The systemd driver beside a systemd in memory: what the real one does too rarely for a test."""

from __future__ import annotations

import asyncio

import pytest

from osrdyne.aio.clock import SystemClock
from osrdyne.drivers.base import DriverContext, InstanceState
from osrdyne.drivers.systemd import SystemdDriver
from osrdyne.drivers.systemd.options import SystemdOptions
from osrdyne.errors import DriverUnavailableError
from osrdyne.testing.driver_harness import make_spec


class HangingUnits:
    """Takes a start and never does it: it waits for another unit."""

    async def states(self, _pattern):
        return {}

    async def start(self, _unit):
        await asyncio.Event().wait()

    async def forget_failure(self, _unit):
        pass


@pytest.fixture
async def driver(tmp_path, monkeypatch):
    options = SystemdOptions(runtime_directory=str(tmp_path / "osrdyne"))
    context = DriverContext(pool="blue", stack="b:1//", clock=SystemClock(), worker_command=())
    driver = SystemdDriver(options, context)

    async def units():
        return HangingUnits()

    monkeypatch.setattr(driver, "_units", units)
    yield driver
    await driver.close()


async def test_start_that_systemd_never_gets_to_is_given_up_and_frees_its_slot(driver, monkeypatch):
    monkeypatch.setattr("osrdyne.drivers.systemd.driver._START_PATIENCE", 0.01)
    with pytest.raises(DriverUnavailableError, match="systemctl list-jobs"):
        await driver.start(make_spec())
    [given_up] = await driver.list_instances()
    assert (given_up.state, str(given_up.exit)) == (InstanceState.EXITED, "ended (it was never started)")
    await driver.remove(given_up.instance_id)
    assert await driver.list_instances() == []
