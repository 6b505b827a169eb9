"""Queue depths: evidence no older than asked for, one listing for all who wait (lifecycle: idle-needs-a-fresh-total,
total-for-hidden-messages)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from osrdyne.broker.management.listings import MessageTotal
from osrdyne.broker.management.models import TOTALS_MAX_AGE
from osrdyne.errors import BrokerUnavailableError
from osrdyne.pool.queues.depths import QueueDepths
from osrdyne.protocol.names import Key
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.context import make_context

A, B = Key("a"), Key("b")


class Listing:
    """Tells what the test wants, from samples as old as samples can be."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.messages: dict[Key, int] = {}
        self.count = 0
        self.failures = 0

    async def list_message_totals(self) -> dict[Key, MessageTotal]:
        self.count += 1
        if self.failures:
            self.failures -= 1
            raise BrokerUnavailableError("down")
        sampled = self.clock.monotonic() - TOTALS_MAX_AGE
        return {key: MessageTotal(count, sampled) for key, count in self.messages.items()}


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(monotonic=100.0)


@pytest.fixture
def listing(clock: VirtualClock) -> Listing:
    return Listing(clock)


@pytest.fixture
async def totals(listing: Listing, clock: VirtualClock) -> AsyncIterator[QueueDepths]:
    totals = QueueDepths(make_context(clock=clock), listing)
    running = asyncio.create_task(totals.run())
    yield totals
    running.cancel()
    await asyncio.wait({running})


async def test_total_is_sampled_after_the_moment_that_was_asked_for(
    totals: QueueDepths, listing: Listing, clock: VirtualClock
) -> None:
    listing.messages = {A: 0}
    assert totals.messages(A, after=100.0) is None
    await clock.advance(TOTALS_MAX_AGE - 0.1)
    assert listing.count == 0
    await clock.advance(2.0)
    assert (totals.messages(A, after=100.0), listing.count) == (0, 1)


async def test_total_from_before_is_not_an_answer(totals: QueueDepths, listing: Listing, clock: VirtualClock) -> None:
    listing.messages = {A: 0}
    totals.messages(A, after=80.0)
    await clock.advance(1.0)
    assert totals.messages(A, after=80.0) == 0
    assert totals.messages(A, after=100.0) is None


@pytest.mark.proves("reference-defects/14-foreign-queue-broke")
async def test_all_who_wait_share_a_listing_and_are_notified(
    totals: QueueDepths, listing: Listing, clock: VirtualClock
) -> None:
    listing.messages = {A: 0, B: 3}
    changed = totals.feed.subscribe()
    totals.messages(A, after=100.0)
    totals.messages(B, after=100.5)
    await clock.advance(TOTALS_MAX_AGE + 2.0)
    assert (sorted(changed.take()), listing.count) == ([A, B], 1)
    assert (totals.messages(A, after=100.0), totals.messages(B, after=100.5)) == (0, 3)


async def test_queue_that_is_not_listed_is_asked_for_no_more_often_than_callers_ask(
    totals: QueueDepths, listing: Listing, clock: VirtualClock
) -> None:
    totals.messages(A, after=100.0)
    await clock.advance(300.0)
    assert (totals.messages(A, after=100.0), listing.count) == (None, 1)
    await clock.advance(300.0)
    assert listing.count == 2


@pytest.mark.proves("broker/management-api-fails")
async def test_listing_that_fails_is_repeated(totals: QueueDepths, listing: Listing, clock: VirtualClock) -> None:
    listing.messages, listing.failures = {A: 0}, 3
    totals.messages(A, after=80.0)
    await clock.advance(30.0)
    assert (totals.messages(A, after=80.0), listing.count) == (0, 4)


async def test_nothing_is_listed_without_a_caller(totals: QueueDepths, clock: VirtualClock) -> None:
    await clock.advance(1.0)
    assert clock.pending == []
