"""Changed settings replace workers one at a time, unchanged ones replace no worker: a real leader in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from osrdyne.config.models import LifecycleSettings
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


@pytest.fixture
def driver(clock: VirtualClock) -> FakeDriver:
    return FakeDriver(clock, pool=POOL)


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


@asynccontextmanager
async def replacing(
    clock: VirtualClock, broker: FakeBroker, driver: FakeDriver
) -> AsyncIterator[tuple[Stack, FakeWorker, FakeWorker]]:
    """A leader with changed settings that has just started the successor of a ready worker: (stack, old, new)."""
    await one_worker(clock, broker, driver)
    driver.current_spec_hash = "changed"
    async with leading(clock, broker=broker, driver=driver, settings=SETTINGS) as stack:
        await clock.advance(1.0)
        old, new = driver.workers_of(A)
        yield stack, old, new


def hear(stack: Stack, worker: FakeWorker) -> None:
    """Let the worker have a control queue."""
    name = f"ctl-{worker.spec.worker_id}"
    stack.broker.declare_queue(name, {})
    routing_key = stack.names.control_worker_routing_key(WorkerId(worker.spec.worker_id))
    stack.broker.bind(name, stack.names.control_exchange, routing_key)


def heard(stack: Stack, worker: FakeWorker) -> list[Command]:
    """The commands that it received."""
    messages = map(control_from_wire, stack.broker.bodies(f"ctl-{worker.spec.worker_id}"))
    return [message.command for message in messages if message is not None]


@pytest.mark.proves("workers/settings-change-workers-run")
async def test_next_leader_with_the_same_settings_touches_no_worker(
    clock: VirtualClock, broker: FakeBroker, driver: FakeDriver
) -> None:
    await one_worker(clock, broker, driver, *(Key(f"key {number}") for number in range(20)))
    async with leading(clock, broker=broker, driver=driver, settings=SETTINGS):
        await clock.advance(120.0)
        assert driver.calls == []


async def test_changed_settings_start_a_successor_before_the_old_worker_may_end(
    clock: VirtualClock, broker: FakeBroker, driver: FakeDriver
) -> None:
    async with replacing(clock, broker, driver) as (stack, old, new):
        hear(stack, old)
        assert (new.instance.spec_hash, new.instance.slot, heard(stack, old)) == ("changed", 1, [])
        await ready(stack, new)
        assert heard(stack, old) == [Command.DRAIN]
        driver.exit_instance(old.instance.instance_id, code=0)
        await clock.advance(300.0)
        assert [worker.instance for worker in driver.workers_of(A)] == [new.instance]
        assert (driver.count("start"), driver.count("stop")) == (1, 0)


@pytest.mark.proves("workers/worker-longer-needed-runs")
async def test_old_worker_with_a_long_job_is_asked_again_and_never_stopped(
    clock: VirtualClock, broker: FakeBroker, driver: FakeDriver
) -> None:
    async with replacing(clock, broker, driver) as (stack, old, new):
        hear(stack, old)
        await ready(stack, new)
        for _ in range(60):
            await clock.advance(25.0)
            await stack.report("a", Event.STOPPING, old.spec.worker_id, in_flight=1)
        assert heard(stack, old).count(Command.DRAIN) > 100
        assert driver.count("stop") == 0


async def test_old_worker_that_never_ends_is_stopped_when_no_request_may_run_that_long(
    clock: VirtualClock, broker: FakeBroker, driver: FakeDriver
) -> None:
    async with replacing(clock, broker, driver) as (stack, old, new):
        await ready(stack, new)
        await clock.advance(SETTINGS.worker.processing_timeout + 60.0)
        assert [worker.instance for worker in driver.workers_of(A)] == [new.instance]
        assert old.gone.is_set()


@pytest.mark.proves("workers/successor-worker-start-never")
async def test_successor_that_never_becomes_ready_leaves_the_old_worker_alone(
    clock: VirtualClock, broker: FakeBroker, driver: FakeDriver
) -> None:
    """The old one consumes the queue; that is no sign that the new one does."""
    async with replacing(clock, broker, driver) as (stack, old, _):
        await ready(stack, old)
        await stack.consume("a")
        await clock.advance(SETTINGS.lifecycle.start_timeout + 5.0)
        assert not old.gone.is_set()
        assert driver.count("stop") == 1


@pytest.mark.proves("workers/successor-worker-start-never")
async def test_successor_that_cannot_start_is_tried_again_while_the_old_worker_serves(
    clock: VirtualClock, broker: FakeBroker, driver: FakeDriver
) -> None:
    await one_worker(clock, broker, driver)
    driver.current_spec_hash = "changed"
    driver.fail_next_start(StartFailedError("No such image."))
    async with leading(clock, broker=broker, driver=driver, settings=SETTINGS) as stack:
        await ready(stack, driver.workers_of(A)[0])
        assert stack.failure_of(A) is not None
        await clock.advance(600.0)
        assert [worker.instance.spec_hash for worker in driver.workers_of(A)] == ["spec", "changed"]


@pytest.mark.proves("workers/such-worker-dies-finished")
async def test_worker_that_dies_while_it_finishes_is_noted_with_what_it_ran(
    clock: VirtualClock, broker: FakeBroker, driver: FakeDriver
) -> None:
    async with replacing(clock, broker, driver) as (stack, old, new):
        await ready(stack, new)
        driver.exit_instance(old.instance.instance_id, signal="SIGKILL")
        await clock.advance(1.0)
        assert stack.metrics.worker_exits._value.get() == 1
        assert [worker.instance for worker in driver.workers_of(A)] == [new.instance]


@pytest.mark.proves("workers/defective-driver-lists-workers")
async def test_leader_does_not_replace_a_worker_that_it_started_and_the_driver_does_not_mark(
    clock: VirtualClock, broker: FakeBroker
) -> None:
    driver = ForgetfulDriver(clock, pool=POOL)
    with capture_logs() as logs:
        async with leading(clock, broker=broker, driver=driver, settings=SETTINGS) as stack:
            stack.require(A)
            await clock.settle()
            await ready(stack, *driver.workers_of(A))
            await clock.advance(3600.0)
            assert (driver.count("start"), driver.count("stop")) == (1, 0)
            assert stack.metrics.mismarked_workers._value.get() == 1
    levels = [entry["log_level"] for entry in logs if entry["event"].startswith("driver lists a worker")]
    assert levels == ["error"]


@pytest.mark.proves("workers/defective-driver-lists-workers")
async def test_worker_that_its_driver_does_not_mark_is_replaced_once_by_the_next_leader(
    clock: VirtualClock, broker: FakeBroker
) -> None:
    driver = ForgetfulDriver(clock, pool=POOL)
    await one_worker(clock, broker, driver)
    async with leading(clock, broker=broker, driver=driver, settings=SETTINGS) as stack:
        await clock.advance(1.0)
        old, new = driver.workers_of(A)
        await ready(stack, new)
        driver.exit_instance(old.instance.instance_id, code=0)
        await clock.advance(3600.0)
        assert ([worker.instance for worker in driver.workers_of(A)], driver.count("start")) == ([new.instance], 1)
