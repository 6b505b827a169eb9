"""The connections of a standby, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from osrdyne.broker.session import LeaderSession
from osrdyne.errors import BrokerUnavailableError
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeConnection, connect_to
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import settings_for

SETTINGS = settings_for()


@pytest.mark.parametrize("purpose", ["leader", "publisher", "consumer"])
async def test_standby_that_loses_a_connection_does_not_take_over(
    clock: VirtualClock, broker: FakeBroker, purpose: str
) -> None:
    """Its term would end at once, and requests would wait until the next one begins."""
    connections: list[FakeConnection] = []
    async with LeaderSession(SETTINGS, clock=clock, connect=connect_to(broker)) as leader:
        _, first = await leader.acquire()
        async with LeaderSession(SETTINGS, clock=clock, connect=connect_to(broker, connections)) as standby:
            waiting = asyncio.create_task(standby.acquire())
            await clock.settle()
            lost = next(one for one in connections if f" {purpose} " in one.options.name)
            lost.cut(BrokerUnavailableError("Connection reset by peer"))
            await clock.settle()
            assert waiting.done()
            with pytest.raises(BrokerUnavailableError, match=f"The {purpose} connection was lost"):
                await waiting
    async with LeaderSession(SETTINGS, clock=clock, connect=connect_to(broker)) as next_leader:
        previous, _ = await next_leader.acquire()
    assert previous == first


async def test_cancelled_wait_for_the_token_leaves_no_task(clock: VirtualClock, broker: FakeBroker) -> None:
    async with LeaderSession(SETTINGS, clock=clock, connect=connect_to(broker)) as leader:
        await leader.acquire()
        async with LeaderSession(SETTINGS, clock=clock, connect=connect_to(broker)) as standby:
            before = asyncio.all_tasks()
            waiting = asyncio.create_task(standby.acquire())
            await clock.settle()
            waiting.cancel()
            await asyncio.wait({waiting})
            await clock.settle()
            assert asyncio.all_tasks() == before
