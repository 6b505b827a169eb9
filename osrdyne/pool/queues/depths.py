"""Message totals of request queues sampled after a given moment: the evidence that a queue is empty (lifecycle:
idle-needs-a-fresh-total, total-for-hidden-messages).

The idle judge and the request queues loop ask again and again; what nobody knows yet is fetched for them, one listing
for all who wait, and told through `feed`. It decides nothing.
"""

from __future__ import annotations

from osrdyne.aio.backoff import Backoff
from osrdyne.aio.signals import ChangeFeed, Wakeup
from osrdyne.broker.management.listings import MessageTotal
from osrdyne.broker.management.models import TOTALS_MAX_AGE
from osrdyne.errors import BrokerError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import QueueListings
from osrdyne.protocol.names import Key

LISTING_RETRY = Backoff(initial=1.0, maximum=30.0)
GATHER_DELAY = 1.0
"""How long a listing that is due waits for others that need one, seconds."""
LISTING_SHARE = 4
"""A listing that is due waits this many times as long as the last one took: with thousands of queues, of which some are
due all the time, RabbitMQ spends a fifth of its time on listings at most."""


class QueueDepths:
    """Totals of queues that run, each no older than somebody asked for."""

    def __init__(self, context: TermContext, listings: QueueListings) -> None:
        self._listings = listings
        self._clock = context.clock
        self._wanted: dict[Key, float] = {}
        self._known: dict[Key, MessageTotal] = {}
        self._wakeup = Wakeup(context.clock)
        self.feed: ChangeFeed[Key] = ChangeFeed()
        """Keys with a new total."""
        self._log: Logger = get_logger("queue_depths")

    def messages(self, key: Key, *, after: float) -> int | None:
        """Messages in the queue in a sample taken after `after` (monotonic); None: not known yet, it is being asked.

        A queue that does not answer keeps None for an answer: whoever still needs it asks again every few seconds.
        """
        known = self._known.get(key)
        if known is not None and known.sampled_after >= after:
            return known.messages
        if self._wanted.get(key) != after:
            self._wanted[key] = after
            self._wakeup.set()
        return None

    async def run(self) -> None:
        """List whenever somebody needs it and the samples can be new enough, for ever."""
        failures, took = 0, 0.0
        while True:
            while (wait := self._due_in()) is None or wait > 0:
                await self._wakeup.wait(wait)
            await self._clock.sleep(max(GATHER_DELAY, LISTING_SHARE * took))
            began = self._clock.monotonic()
            try:
                listed = await self._listings.list_message_totals()
            except BrokerError as error:
                failures += 1
                self._log.warning("listing failed, nothing is stopped or deleted meanwhile", error=str(error))
                await self._clock.sleep(LISTING_RETRY.delay(failures))
                continue
            failures, took = 0, self._clock.monotonic() - began
            self._take(listed)

    def _due_in(self) -> float | None:
        """Seconds until a listing can tell what somebody wants to know; None while nobody does."""
        if not self._wanted:
            return None
        return min(self._wanted.values()) + TOTALS_MAX_AGE - self._clock.monotonic()

    def _take(self, listed: dict[Key, MessageTotal]) -> None:
        """Keep what answers somebody; a queue that was due and is not listed waits until it is asked for again."""
        latest = self._clock.monotonic() - TOTALS_MAX_AGE
        answered = {
            key: listed[key]
            for key, after in self._wanted.items()
            if key in listed and listed[key].sampled_after >= after
        }
        self._wanted = {
            key: after
            for key, after in self._wanted.items()
            if key not in answered and (key in listed or after > latest)
        }
        self._known = answered
        for key in answered:
            self.feed.notify(key)
