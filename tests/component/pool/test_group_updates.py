"""Changed settings where an instance is a whole group, whose workers the platform replaces itself."""

from dataclasses import replace

import pytest

from osrdyne.errors import DriverUnavailableError, StartFailedError
from osrdyne.protocol.activity import Event
from osrdyne.protocol.names import Key
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.drivers import FakeDriver
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import POOL, leading

A = Key("a")


class GroupDriver(FakeDriver):
    """Its instances are groups. `refusals` are raised first."""

    instance_is_worker = False

    def __init__(self, clock):
        super().__init__(clock, pool=POOL)
        self.refusals = []
        self.updates = []

    async def update(self, instance_id, spec):
        self.updates.append(spec)
        if self.refusals:
            raise self.refusals.pop(0)
        [worker] = [one for one in self.workers_of(spec.key) if one.instance.instance_id == instance_id]
        worker.instance = replace(worker.instance, spec_hash=self.spec_hash())
        return worker.instance


@pytest.fixture
async def group():
    """A group that serves, and a daemon that has left it: clock, broker, driver."""
    clock = VirtualClock()
    broker, driver = FakeBroker(clock), GroupDriver(clock)
    async with leading(clock, broker=broker, driver=driver) as stack:
        await stack.publish("a", b"1")
        await clock.advance(1.0)
        await stack.report("a", Event.READY)
    driver.calls.clear()
    return clock, broker, driver


@pytest.mark.parametrize("updates", [0, 1], ids=["unchanged", "changed"])
async def test_changed_settings_are_given_to_the_group_once(group, updates):
    clock, broker, driver = group
    driver.current_spec_hash = "changed" if updates else driver.current_spec_hash
    async with leading(clock, broker=broker, driver=driver):
        await clock.advance(200.0)
        [worker] = driver.workers_of(A)
        assert (worker.instance.spec_hash, len(driver.updates)) == (driver.current_spec_hash, updates)
        assert (driver.count("start"), driver.count("stop")) == (0, 0)


@pytest.mark.parametrize("refusal", [DriverUnavailableError("away"), StartFailedError("no such label")], ids=repr)
async def test_group_that_cannot_be_changed_goes_on_and_is_tried_again(group, refusal):
    clock, broker, driver = group
    driver.current_spec_hash = "changed"
    driver.refusals = [refusal]
    async with leading(clock, broker=broker, driver=driver) as stack:
        await clock.advance(30.0)
        assert (stack.running("a"), len(driver.updates), driver.count("stop")) == (1, 2, 0)


@pytest.mark.proves("workers/defective-driver-lists-workers")
async def test_group_that_its_driver_does_not_mark_is_changed_once(group, monkeypatch):
    clock, broker, driver = group
    driver.current_spec_hash = "changed"
    listing = driver.list_instances

    async def forgetful():
        return [replace(instance, spec_hash="") for instance in await listing()]

    monkeypatch.setattr(driver, "list_instances", forgetful)
    async with leading(clock, broker=broker, driver=driver) as stack:
        await clock.advance(200.0)
        mismarked = stack.metrics.registry.get_sample_value("osrdyne_mismarked_workers_total")
        assert (len(driver.updates), mismarked) == (1, 1)
