"""What a new leader does first, where it finds many groups: a real leader in virtual time."""

from osrdyne.daemon.term import REPORTS_AT_ONCE
from osrdyne.protocol.control import Command as ControlCommand
from osrdyne.protocol.control import control_from_wire
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.testing.drivers import FakeDriver
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import POOL, leading

NAMES = PoolNames(POOL)
SLOW = 20.0
"""Seconds until RabbitMQ takes a control message."""
FOUND = [Key(f"found{number:02}") for number in range(40)]


async def test_new_leader_serves_new_keys_while_the_workers_it_found_are_asked(clock):
    """RabbitMQ is slow to take what the leader asks of thousands of groups."""
    broker, driver = FakeBroker(clock), FakeDriver(clock, pool=POOL)
    async with leading(clock, broker=broker, driver=driver) as stack:
        for key in FOUND:
            stack.require(key)
        await clock.advance(1.0)
    under_way = 0

    async def be_slow(command):
        nonlocal under_way
        if command.name == "publish" and command.target == NAMES.control_exchange and not command.done:
            under_way += 1
            await clock.sleep(SLOW)

    broker.hook = be_slow
    began = clock.monotonic()
    async with leading(clock, broker=broker, driver=driver) as stack:
        await stack.publish("new", b"1")
        await clock.advance(1.0)
        assert clock.monotonic() < began + SLOW
        assert (stack.waiting("new"), under_way) == ([b"1"], REPORTS_AT_ONCE)
        broker.declare_queue("ctl", {})
        for key in FOUND:
            broker.bind("ctl", NAMES.control_exchange, NAMES.control_group_routing_key(key))
        await clock.advance(SLOW * len(FOUND))
        asked = [control_from_wire(body) for body in broker.bodies("ctl")]
        assert [one.command for one in asked if one is not None] == len(FOUND) * [ControlCommand.RESUME]
