"""Groups get more workers and give them back: a real leader in virtual time."""

import pytest

from osrdyne.config.models import LifecycleSettings, ScalingSettings, Settings
from osrdyne.protocol.activity import Event
from osrdyne.protocol.control import Command, control_from_wire
from osrdyne.protocol.names import Key
from osrdyne.testing.fakes.stack import Stack, leading, settings_for

A = Key("a")
LONG = LifecycleSettings(unbind_delay=36_000.0, stop_delay=600.0)


def scaled(**scaling: object) -> Settings:
    values = {"min": 1, "max": 4, "target_lag": 30.0, "cooldown": 300.0} | scaling
    base = settings_for(LONG)
    worker = base.worker.model_copy(update={"scaling": ScalingSettings.model_validate(values)})
    return base.model_copy(update={"worker": worker})


@pytest.fixture
def settings():
    return scaled()


async def all_ready(stack: Stack) -> None:
    for worker in stack.driver.workers_of(A):
        await stack.report("a", Event.READY, worker.spec.worker_id)


def serve_all(stack: Stack) -> None:
    """Nothing waits any more."""
    stack.broker.queues[stack.names.request_queue(A)].ready.clear()


def hear(stack: Stack) -> None:
    """Keep what is sent to the workers that there are now."""
    stack.broker.declare_queue("ctl", {})
    for worker in stack.driver.workers_of(A):
        routing_key = stack.names.control_worker_routing_key(worker.spec.worker_id)
        stack.broker.bind("ctl", stack.names.control_exchange, routing_key)


async def flood(stack: Stack) -> None:
    """One busy worker, and more requests than it can do."""
    await stack.publish("a", b"first")
    await stack.clock.advance(1.0)
    await all_ready(stack)
    for number in range(50):
        await stack.publish("a", str(number).encode())
    (worker,) = stack.driver.workers_of(A)
    for _ in range(20):
        await stack.report("a", Event.BUSY, worker.spec.worker_id)
        await stack.clock.advance(5.0)


async def test_group_whose_requests_wait_gets_more_workers_and_gives_them_back(stack):
    """A surplus worker that exited is no crash, and is not started again."""
    await flood(stack)
    assert sorted(worker.instance.slot for worker in stack.driver.workers_of(A)) == [0, 1, 2, 3]
    await all_ready(stack)
    serve_all(stack)
    await stack.clock.advance(900.0)
    for entry in stack.instances_of(A):
        if entry.draining:
            stack.driver.exit_instance(entry.instance.instance_id, code=0)
    await stack.clock.advance(60.0)
    exits = stack.metrics.registry.get_sample_value("osrdyne_worker_exits_total")
    assert (stack.running("a"), exits, stack.driver.count("start")) == (1, 0, 4)


async def test_idle_pool_asks_rabbitmq_for_no_listing(stack, clock):
    await stack.publish("a", b"1")
    await clock.advance(1.0)
    await all_ready(stack)
    before = stack.broker.count("list_queues")
    await clock.advance(50.0)
    assert stack.broker.count("list_queues") == before


@pytest.mark.proves("workers/worker-longer-needed-runs")
async def test_busy_workers_are_spared(stack, clock):
    await flood(stack)
    await all_ready(stack)
    serve_all(stack)
    busy = {worker.instance.instance_id: worker.spec.worker_id for worker in stack.driver.workers_of(A)[:2]}
    for _ in range(200):
        for worker_id in busy.values():
            await stack.report("a", Event.BUSY, worker_id)
        await clock.advance(5.0)
    draining = {entry.instance.instance_id for entry in stack.instances_of(A) if entry.draining}
    assert (len(draining), draining & busy.keys()) == (2, set())


@pytest.mark.parametrize("reports", [True, False], ids=["request-received", "started-only"])
@pytest.mark.proves("workers/worker-never-reports-request")
async def test_workers_that_never_report_completion_scale_by_their_queue(stack, reports):
    await stack.publish("a", b"first")
    await stack.clock.advance(1.0)
    (worker,) = stack.driver.workers_of(A)
    if reports:
        await stack.report("a", Event.READY, worker.spec.worker_id)
    else:
        stack.assume_ready(worker.spec.worker_id, A)
    for number in range(50):
        await stack.publish("a", str(number).encode())
    consumer = await stack.consume("a")
    for _ in range(20):
        if reports:
            await stack.report("a", Event.REQUEST_RECEIVED, worker.spec.worker_id)
        await stack.clock.advance(5.0)
    assert len(stack.driver.workers_of(A)) == 4
    while consumer.waiting():
        await (await consumer.get()).ack()
        await stack.clock.settle()
    serve_all(stack)
    hear(stack)
    for one in stack.driver.workers_of(A):
        stack.assume_ready(one.spec.worker_id, A)
    await stack.clock.advance(900.0)
    sent = [message.command for message in map(control_from_wire, stack.broker.bodies("ctl")) if message is not None]
    assert sent[:3] == [Command.DRAIN] * 3


@pytest.mark.parametrize("most", [1, 4])
async def test_groups_that_are_over_are_forgotten(clock, most):
    async with leading(clock, settings=scaled(max=most)) as stack:
        for change in (stack.require, stack.retire):
            for number in range(20):
                change(Key(str(number)))
            await clock.advance(1.0)
        await clock.advance(120.0)
        assert (stack.groups(), stack.known_queues(), stack.known_workers()) == ([], [], [])
        assert stack.term.workers.autoscaler._scales == {}
