"""Fixtures of the tests of processors: a broker with a queue for answers, and leaders of both kinds of pools."""

import pytest
from managed_pool import managing
from replies import broker_with_replies

from osrdyne.testing.fakes.stack import leading


@pytest.fixture
def broker(clock):
    return broker_with_replies(clock)


@pytest.fixture
async def stack(clock, broker):
    """A leader of a managed pool without routes."""
    async with managing(clock, broker) as stack:
        yield stack


@pytest.fixture
async def direct(clock, broker):
    """A leader of a direct pool."""
    async with leading(clock, broker=broker) as stack:
        yield stack


@pytest.fixture(params=["direct", "managed"])
async def any_pool(request, clock, broker):
    """A leader of either kind of pool."""
    pool = leading(clock, broker=broker) if request.param == "direct" else managing(clock, broker)
    async with pool as stack:
        yield stack
