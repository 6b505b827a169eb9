"""How a term ends on request: in order, and with every worker of the pool where that was asked for."""

import asyncio

from osrdyne.daemon.term import StopRequest
from osrdyne.protocol.names import Key
from osrdyne.testing.drivers import FakeDriver
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import POOL, leading, make_stack


async def test_stop_leaves_workers_queues_and_requests_in_place_for_the_next_leader(clock):
    broker, driver = FakeBroker(clock), FakeDriver(clock, pool=POOL)
    for _ in range(3):
        async with leading(clock, broker=broker, driver=driver) as stack:
            await stack.publish("a", b"1")
            await clock.settle()
            stack.stop.requested.set()
            await asyncio.wait({stack.task})
            assert stack.task.exception() is None
            assert (stack.is_bound("a"), stack.running("a")) == (True, 1)
    assert (driver.count("start"), stack.waiting("a")) == (1, [b"1"] * 3)


async def test_stop_with_workers_ends_every_worker_of_the_pool(clock):
    """Also one that is just being started."""
    stack = make_stack(clock)
    stack.stop = StopRequest(asyncio.Event(), stop_workers=True)
    stack.task = asyncio.create_task(stack.lead())
    await clock.settle()
    await stack.publish("a", b"1")
    await clock.settle()
    landing = asyncio.Event()
    start = stack.driver.start

    async def land_in_spite_of_a_cancellation(spec):
        """As a call in a thread does."""
        try:
            await landing.wait()
        except asyncio.CancelledError:
            await start(spec)
            raise
        return await start(spec)

    stack.driver.start = land_in_spite_of_a_cancellation  # type: ignore[method-assign]
    stack.require(Key("b"))
    await clock.settle()
    stack.stop.requested.set()
    await asyncio.wait({stack.task})
    assert (stack.driver.backend.workers, stack.waiting("a"), stack.is_bound("b")) == ({}, [b"1"], True)
