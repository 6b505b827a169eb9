"""Priorities that no route uses any more: their queues are served until they are empty, then they go (lifecycle:
several-queues-per-group)."""

import json

import pytest
from managed_pool import ALERTS, REST, change, managing, waiting

from osrdyne.amqp import Message
from osrdyne.broker.management.models import TOTALS_MAX_AGE
from osrdyne.pool.routing.priorities import NEEDED_FOR
from osrdyne.protocol.activity import Event
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import Stack, leading

ALERT = {"level": "alert"}
STORE = "pool-req-a_Pri0"
A_WHILE = 60.0


@pytest.fixture
async def stack(clock, broker):
    async with managing(clock, broker, alerts=ALERTS, rest=REST) as stack:
        yield stack


def own_queues(broker: FakeBroker) -> list[str]:
    return sorted(name for name in broker.queues if name.startswith("pool-req-"))


async def with_an_alert(stack: Stack) -> None:
    """A group with a worker, and a request in the queue of priority 0."""
    await stack.publish("a", b"1", headers=ALERT)
    await stack.clock.settle()
    stack.broker.declare_queue("control", {})
    stack.broker.bind("control", stack.names.control_exchange, "group.a")
    await stack.report("a", Event.READY)


def announced_queues(broker: FakeBroker) -> list[str]:
    """The queues in the last message to the workers."""
    queues = json.loads(broker.bodies("control")[-1])["queues"]
    assert isinstance(queues, list)
    return queues


async def serve(stack: Stack) -> FakeChannel:
    """A worker takes what is in the queue of priority 0, and goes on consuming it until its channel is closed."""
    channel = FakeChannel(stack.broker)
    consumer = await channel.consume(STORE, prefetch=1)
    while stack.broker.bodies(STORE):
        delivery = await consumer.get()
        await delivery.ack()
    return channel


@pytest.mark.proves("managed/priority-removed-requests-wait")
async def test_priority_queue_that_no_route_uses_is_deleted_once_it_is_empty_and_not_consumed(stack, clock):
    await with_an_alert(stack)
    await change(stack, rest=REST)
    await clock.advance(A_WHILE)
    assert (waiting(stack, 0), announced_queues(stack.broker)) == ([b"1"], [STORE, "pool-req-a"])
    worker = await serve(stack)
    await clock.advance(A_WHILE)
    assert (own_queues(stack.broker), announced_queues(stack.broker)) == (["pool-req-a", STORE], ["pool-req-a"])
    await worker.close()
    await clock.advance(A_WHILE)
    assert own_queues(stack.broker) == ["pool-req-a"]


@pytest.mark.proves("managed/priority-removed-requests-wait")
async def test_request_on_its_way_into_an_unused_priority_queue_is_served_from_there(stack):
    """It comes back as an orphan, and its class is used again, for a while."""
    await with_an_alert(stack)
    await change(stack, rest=REST)
    await stack.clock.settle()
    late = Message(body=b"2")
    await FakeChannel(stack.broker, confirms=True).publish(late, exchange="pool-work-xchg_Pri0", routing_key="a")
    await stack.clock.advance(1.0)
    assert (waiting(stack, 0), stack.orphans()) == ([b"1", b"2"], [])
    await (await serve(stack)).close()
    await stack.clock.advance(NEEDED_FOR + A_WHILE)
    assert own_queues(stack.broker) == ["pool-req-a"]


@pytest.mark.parametrize("by", ["route", "request"])
async def test_queue_of_a_priority_that_is_used_again_stays(stack, clock, by):
    await with_an_alert(stack)
    worker = await serve(stack)
    await change(stack, rest=REST)
    await clock.advance(A_WHILE)
    assert announced_queues(stack.broker) == ["pool-req-a"]
    if by == "route":
        await change(stack, alerts=ALERTS, rest=REST)
        await stack.publish("a", b"2", headers=ALERT)
    else:  # nothing could come into it; should something be there anyway, it is not left there
        stack.broker.queues[STORE].put(Message(body=b"2"), exchange="", routing_key=STORE)
        await worker.close()
    await clock.advance(A_WHILE)
    assert announced_queues(stack.broker) == [STORE, "pool-req-a"]
    assert own_queues(stack.broker) == ["pool-req-a", STORE]


async def test_totals_from_before_the_settle_time_prove_nothing(clock, broker):
    broker.totals_age = TOTALS_MAX_AGE
    async with managing(clock, broker, alerts=ALERTS, rest=REST) as stack:
        await stack.publish("a", b"0")
        await clock.advance(A_WHILE)
        bound_at = clock.monotonic()
        await change(stack, rest=REST)
        while STORE in broker.queues:
            await clock.advance(1.0)
        assert clock.monotonic() - bound_at >= stack.settings.lifecycle.settle_delay + TOTALS_MAX_AGE


@pytest.mark.proves("managed/managed-pool-becomes-direct")
async def test_pool_that_becomes_a_direct_one_and_a_managed_one_again_serves_what_waits(clock, broker):
    async with managing(clock, broker, alerts=ALERTS, rest=REST) as stack:
        await with_an_alert(stack)
    async with leading(clock, broker=broker) as stack:
        await stack.publish("a", b"2")
        await clock.advance(A_WHILE)
        await stack.report("a", Event.READY)
        await clock.settle()
        assert (waiting(stack, None), waiting(stack, 0)) == ([b"2"], [b"1"])
        assert announced_queues(broker) == [STORE, "pool-req-a"]  # the one that goes comes first
        await (await serve(stack)).close()
        await clock.advance(A_WHILE)
        assert (own_queues(broker), stack.is_bound("a")) == (["pool-req-a"], True)
    async with managing(clock, broker, alerts=ALERTS, rest=REST) as stack:
        await stack.publish("a", b"3", headers=ALERT)
        await clock.settle()
        assert (waiting(stack, None), waiting(stack, 0), stack.is_bound("a")) == ([b"2"], [b"3"], False)
