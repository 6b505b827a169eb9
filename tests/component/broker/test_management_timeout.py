"""The limit of a call of RabbitMQ's HTTP API, against a server that answers slowly."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from osrdyne.broker.management.client import ManagementClient
from osrdyne.config.models import BrokerSettings
from osrdyne.errors import BrokerUnavailableError, ManagementUnavailableError
from osrdyne.testing.clock import VirtualClock

LIMIT = 0.2


@pytest.mark.proves("broker/answer-management-api-comes")
async def test_listing_that_is_too_late_has_more_time_at_the_next_attempt():
    """With thousands of queues RabbitMQ may need longer for it than any other call may take."""
    clock, asked = VirtualClock(), 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        await asyncio.sleep(LIMIT * 2.5)
        return httpx.Response(200, json={"page_count": 1, "items": []})

    settings = BrokerSettings(management_timeout=LIMIT)
    async with ManagementClient(settings, clock=clock, transport=httpx.MockTransport(answer)) as management:
        for _ in range(2):
            with pytest.raises(ManagementUnavailableError):
                await management.list_queues("pool-")
        assert await management.list_queues("pool-") == []
        with pytest.raises(ManagementUnavailableError):
            await management.overview()
    assert asked == 4


class Trickle(httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        for byte in b" " * 60 + b"[]":
            await asyncio.sleep(LIMIT / 10)
            yield bytes([byte])


@pytest.mark.proves("broker/answer-management-api-comes")
async def test_answer_that_comes_byte_by_byte_is_too_late():
    """Each byte comes in time, and the whole answer does not."""
    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=Trickle()))
    async with ManagementClient(BrokerSettings(management_timeout=LIMIT), transport=transport) as management:
        with pytest.raises(BrokerUnavailableError):
            await management.list_policies()
