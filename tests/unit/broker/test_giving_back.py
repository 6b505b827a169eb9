"""Requests that a probe got out of a queue go back to the broker, whatever it takes."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from osrdyne.broker.publishing.publisher import publish_until_taken
from osrdyne.errors import BrokerError, BrokerSilentError, BrokerUnavailableError, PublishRefusedError
from osrdyne.testing.clock import VirtualClock


async def test_request_that_is_refused_or_not_confirmed_is_published_until_it_is_taken() -> None:
    clock = VirtualClock()
    outcomes: list[BrokerError | None] = [BrokerSilentError("no confirm"), PublishRefusedError("no queue"), None]

    async def publish() -> None:
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome

    giving_back = asyncio.create_task(publish_until_taken(publish, clock=clock, log=structlog.get_logger()))
    await clock.advance(60.0)
    assert (giving_back.done(), outcomes) == (True, [])
    await giving_back


async def test_request_whose_connection_is_lost_is_left_to_the_broker() -> None:
    async def publish() -> None:
        raise BrokerUnavailableError("gone")

    with pytest.raises(BrokerUnavailableError):
        await publish_until_taken(publish, clock=VirtualClock(), log=structlog.get_logger())
