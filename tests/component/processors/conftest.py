"""Fixtures of the tests of processors: a broker with a queue for answers, and leaders of both kinds of pools."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from managed_pool import managing
from replies import broker_with_replies

from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import Stack, leading


@pytest.fixture
def broker(clock: VirtualClock) -> FakeBroker:
    return broker_with_replies(clock)


@pytest.fixture
async def stack(clock: VirtualClock, broker: FakeBroker) -> AsyncIterator[Stack]:
    """A leader of a managed pool without routes."""
    async with managing(clock, broker) as stack:
        yield stack


@pytest.fixture
async def direct(clock: VirtualClock, broker: FakeBroker) -> AsyncIterator[Stack]:
    """A leader of a direct pool."""
    async with leading(clock, broker=broker) as stack:
        yield stack


@pytest.fixture(params=["direct", "managed"])
async def any_pool(request: pytest.FixtureRequest, clock: VirtualClock, broker: FakeBroker) -> AsyncIterator[Stack]:
    """A leader of either kind of pool."""
    pool = leading(clock, broker=broker) if request.param == "direct" else managing(clock, broker)
    async with pool as stack:
        yield stack
