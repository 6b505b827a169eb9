"""Changed settings replace workers one at a time, unchanged ones replace no worker: a real leader in virtual time."""

from dataclasses import dataclass, replace

import pytest
from structlog.testing import capture_logs

from osrdyne.config.models import LifecycleSettings
from osrdyne.config.profiles import Profile
from osrdyne.drivers.base import Instance
from osrdyne.errors import StartFailedError
from osrdyne.protocol.activity import Event
from osrdyne.protocol.control import Command, control_from_wire
from osrdyne.protocol.names import Key, WorkerId
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.drivers import FakeDriver, FakeWorker
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import POOL, Stack, leading, settings_for

A = Key("a")
SETTINGS = settings_for(LifecycleSettings(unbind_delay=36_000.0, stop_delay=600.0, start_attempts=1))


class ForgetfulDriver(FakeDriver):
    """It starts workers with the settings that it was given, and its listing does not contain them."""

    async def list_instances(self) -> list[Instance]:
        return [replace(instance, spec_hash="") for instance in await super().list_instances()]


async def ready(stack: Stack, worker: FakeWorker) -> None:
    """It reports that it is ready, and no more: its later silence has no effect."""
    await stack.report(worker.instance.key, Event.READY, worker.spec.worker_id)


async def one_worker(clock: VirtualClock, broker: FakeBroker, driver: FakeDriver, *keys: Key) -> None:
    """What a leader leaves behind: a ready worker for each key."""
    async with leading(clock, broker=broker, driver=driver, settings=SETTINGS) as stack:
        for key in keys or (A,):
            stack.require(key)
            await clock.settle()
            await ready(stack, *driver.workers_of(key))
    driver.calls.clear()


@dataclass
class Replacement:
    """A leader with changed settings has just started the successor of a ready worker, whose commands are kept."""

    stack: Stack
    old: FakeWorker
    new: FakeWorker

    async def ready(self) -> None:
        """The successor is ready."""
        await ready(self.stack, self.new)

    def workers(self) -> list[Instance]:
        return [worker.instance for worker in self.stack.driver.workers_of(A)]

    def heard(self) -> list[Command]:
        """The commands that the old worker received."""
        messages = map(control_from_wire, self.stack.broker.bodies("ctl"))
        return [message.command for message in messages if message is not None]


@pytest.fixture
async def replacement(clock, broker, driver):
    await one_worker(clock, broker, driver)
    driver.current_spec_hash = "changed"
    async with leading(clock, broker=broker, driver=driver, settings=SETTINGS) as stack:
        await clock.advance(1.0)
        old, new = driver.workers_of(A)
        broker.declare_queue("ctl", {})
        routing_key = stack.names.control_worker_routing_key(WorkerId(old.spec.worker_id))
        broker.bind("ctl", stack.names.control_exchange, routing_key)
        yield Replacement(stack, old, new)


@pytest.mark.proves("workers/settings-change-workers-run")
async def test_next_leader_with_the_same_settings_touches_no_worker(clock, broker, driver):
    await one_worker(clock, broker, driver, *(Key(f"key {number}") for number in range(20)))
    async with leading(clock, broker=broker, driver=driver, settings=SETTINGS):
        await clock.advance(120.0)
        assert driver.calls == []


async def test_changed_settings_start_a_successor_before_the_old_worker_may_end(replacement):
    stack, new = replacement.stack, replacement.new
    assert (new.instance.spec_hash, new.instance.slot, replacement.heard()) == ("changed", 1, [])
    await replacement.ready()
    assert replacement.heard() == [Command.DRAIN]
    stack.driver.exit_instance(replacement.old.instance.instance_id, code=0)
    await stack.clock.advance(300.0)
    assert replacement.workers() == [new.instance]
    assert (stack.driver.count("start"), stack.driver.count("stop")) == (1, 0)


@pytest.mark.proves("workers/worker-longer-needed-runs", "workers/such-worker-dies-finished")
async def test_old_worker_with_a_long_job_is_never_stopped_and_its_death_is_noted(replacement):
    stack, old = replacement.stack, replacement.old
    await replacement.ready()
    for _ in range(60):
        await stack.clock.advance(25.0)
        await stack.report("a", Event.STOPPING, old.spec.worker_id, in_flight=1)
    assert replacement.heard().count(Command.DRAIN) > 100
    assert stack.driver.count("stop") == 0
    stack.driver.exit_instance(old.instance.instance_id, signal="SIGKILL")
    await stack.clock.advance(1.0)
    assert stack.metrics.registry.get_sample_value("osrdyne_worker_exits_total") == 1
    assert replacement.workers() == [replacement.new.instance]


@pytest.mark.proves("workers/successor-worker-start-never")
async def test_successor_that_never_becomes_ready_leaves_the_old_worker_alone(replacement):
    """The old one consumes the queue; that is no sign that the new one does."""
    stack = replacement.stack
    await ready(stack, replacement.old)
    await stack.consume("a")
    await stack.clock.advance(SETTINGS.lifecycle.start_timeout + 5.0)
    assert not replacement.old.gone.is_set()
    assert stack.driver.count("stop") == 1


@pytest.mark.proves("workers/successor-worker-start-never")
async def test_successor_that_cannot_start_is_tried_again_while_the_old_worker_serves(clock, broker, driver):
    await one_worker(clock, broker, driver)
    driver.current_spec_hash = "changed"
    driver.fail_next_start(StartFailedError("No such image."))
    async with leading(clock, broker=broker, driver=driver, settings=SETTINGS) as stack:
        await ready(stack, driver.workers_of(A)[0])
        assert stack.failure_of(A) is not None
        await clock.advance(600.0)
        assert [worker.instance.spec_hash for worker in driver.workers_of(A)] == ["spec", "changed"]


@pytest.mark.proves("workers/defective-driver-lists-workers")
async def test_worker_that_its_driver_does_not_mark_is_replaced_once_and_by_the_next_leader_only(clock, broker):
    driver = ForgetfulDriver(clock, pool=POOL)
    with capture_logs() as logs:
        async with leading(clock, broker=broker, driver=driver, settings=SETTINGS) as stack:
            stack.require(A)
            await clock.settle()
            await ready(stack, *driver.workers_of(A))
            await clock.advance(3600.0)
            assert (driver.count("start"), driver.count("stop")) == (1, 0)
            assert stack.metrics.registry.get_sample_value("osrdyne_mismarked_workers_total") == 1
    assert [entry["log_level"] for entry in logs if entry["log_level"] == "error"] == ["error"]
    async with leading(clock, broker=broker, driver=driver, settings=SETTINGS) as stack:
        await clock.advance(1.0)
        old, new = driver.workers_of(A)
        await ready(stack, new)
        driver.exit_instance(old.instance.instance_id, code=0)
        await clock.advance(3600.0)
        assert ([worker.instance for worker in driver.workers_of(A)], driver.count("start")) == ([new.instance], 2)


@pytest.mark.parametrize("profiles", [(), ({"match": "a", "concurrency": 2},)], ids=["pool", "profile"])
async def test_changed_application_replaces_workers_while_the_daemon_leads(clock, broker, driver, profiles):
    """As `osrdyne dev` does."""
    worker = SETTINGS.worker.model_copy(update={"profiles": tuple(map(Profile.model_validate, profiles))})
    settings = SETTINGS.model_copy(update={"worker": worker})
    async with leading(clock, broker=broker, driver=driver, settings=settings) as stack:
        stack.require(A)
        await clock.settle()
        [old] = driver.workers_of(A)
        await ready(stack, old)
        driver.current_spec_hash = "changed"
        await stack.term.routing.profiles.replace_workers()
        await clock.advance(1.0)
        new = driver.workers_of(A)[-1]
        assert len(driver.workers_of(A)) == 2
        await ready(stack, new)
        await clock.advance(1.0)
        assert new.instance.spec_hash != old.instance.spec_hash
