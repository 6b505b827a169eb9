"""Queues that a killed node came back with, and that never get a leader (decision 0020): a real leader in memory."""

import pytest

from osrdyne.broker.queues.request_queues import LEADERLESS_PAUSE, LEADERLESS_SILENCES
from osrdyne.broker.topology.declarations import pool_topology, request_queue_arguments
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import POOL, leading

A = Key("a")
QUEUE = "pool-req-a"
LEADERLESS_AFTER = LEADERLESS_SILENCES * LEADERLESS_PAUSE


@pytest.fixture
def broker(clock):
    """A node with a queue that was declared and not bound when it was killed."""
    broker = FakeBroker(clock)
    queue = broker.declare_queue(QUEUE, request_queue_arguments(PoolNames("pool"), A))
    queue.running, queue.is_leaderless = False, True
    return broker


@pytest.mark.proves("broker/rabbitmq-4-0-killed")
async def test_queue_that_never_got_a_leader_is_declared_again(stack, clock):
    await stack.publish("a", b"1")
    await stack.publish("b", b"2")
    await clock.settle()
    assert (stack.waiting("b"), stack.orphans()) == ([b"2"], [b"1"])
    await clock.advance(2 * LEADERLESS_AFTER)
    assert (stack.waiting("a"), stack.orphans(), stack.broker.count("delete", QUEUE)) == ([b"1"], [], 1)


async def test_queue_that_gets_its_leader_in_time_is_kept(stack, clock):
    await stack.publish("a", b"1")
    await clock.advance(LEADERLESS_AFTER / 2)
    stack.broker.set_running(QUEUE, True)
    await clock.advance(LEADERLESS_AFTER)
    assert (stack.waiting("a"), stack.broker.count("delete", QUEUE)) == ([b"1"], 0)


@pytest.mark.proves("broker/rabbitmq-4-0-killed")
@pytest.mark.parametrize("was_bound", [True, False], ids=["it may hold requests", "its node is down"])
async def test_queue_that_may_hold_requests_is_not_deleted(clock, broker, was_bound):
    broker.queues[QUEUE].is_leaderless = was_bound
    for exchange in pool_topology(POOL).exchanges:
        broker.declare_exchange(exchange.name, exchange.kind, exchange.arguments)
    if was_bound:
        await FakeChannel(broker).bind_queue(QUEUE, f"{POOL}-req-xchg", "a")
    async with leading(clock, broker=broker) as stack:
        await stack.publish("a", b"1")
        await clock.advance(10 * LEADERLESS_AFTER)
        assert broker.count("delete", QUEUE) == 0


async def test_unused_leaderless_queue_is_deleted(stack, clock):
    await clock.advance(3600.0)
    assert (stack.has_queue("a"), stack.groups()) == (False, [])
