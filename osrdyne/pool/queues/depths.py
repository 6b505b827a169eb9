"""Message totals of request queues in samples taken after a given moment: the evidence that a queue is empty
(lifecycle: idle-needs-a-fresh-total, total-for-hidden-messages).

The idle reaper, the eviction and the request queues loop request totals repeatedly. Missing totals are fetched with one
listing for all of them and announced through `feed`. This module decides nothing.
"""

from __future__ import annotations

from osrdyne.aio.clock import Backoff
from osrdyne.aio.signals import ChangeFeed, Wakeup
from osrdyne.broker.management.listings import MessageTotal
from osrdyne.broker.management.models import TOTALS_MAX_AGE
from osrdyne.errors import BrokerError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import QueueListings
from osrdyne.protocol.names import Key

LISTING_RETRY = Backoff(initial=1.0, maximum=30.0)
GATHER_DELAY = 1.0  # Seconds that a due listing waits, to serve further requests for totals.
# A due listing waits this many times as long as the last one took: with thousands of queues, some of which are always
# due, RabbitMQ spends at most a fifth of its time on listings.
LISTING_SHARE = 4


class QueueDepths:
    """Totals of running queues, each at least as fresh as requested."""

    def __init__(self, context: TermContext, listings: QueueListings) -> None:
        self._listings = listings
        self._clock = context.clock
        self._requested: dict[Key, float] = {}
        self._known: dict[Key, MessageTotal] = {}
        self._wakeup = Wakeup(context.clock)
        self.feed: ChangeFeed[Key] = ChangeFeed()  # Keys with a new total.
        self._log: Logger = get_logger("queue_depths")

    def messages(self, key: Key, *, after: float) -> int | None:
        """Return the messages of a queue in a sample taken after `after` (monotonic); None while that is being fetched.

        The total of a queue that does not answer stays None: components that need it ask again every few seconds.
        """
        known = self._known.get(key)
        # Never an older sample: it may be from before the last publish (lifecycle: idle-needs-a-fresh-total).
        if known is not None and known.sampled_after >= after:
            return known.messages
        if self._requested.get(key) != after:
            self._requested[key] = after
            self._wakeup.set()
        return None

    async def run(self) -> None:
        """List whenever a total is requested and samples can be fresh enough. Runs until cancelled."""
        failures, took = 0, 0.0
        while True:
            while (wait := self._due_in()) is None or wait > 0:
                await self._wakeup.wait(wait)
            # One listing serves all requests that arrive meanwhile, and RabbitMQ rests in between.
            await self._clock.sleep(max(GATHER_DELAY, LISTING_SHARE * took))
            began = self._clock.monotonic()
            try:
                listed = await self._listings.list_message_totals()
            except BrokerError as error:
                failures += 1
                # Nothing is stopped or deleted until a listing succeeds.
                self._log.warning("queue listing failed", error=str(error))
                await self._clock.sleep(LISTING_RETRY.delay(failures))
                continue
            failures, took = 0, self._clock.monotonic() - began
            self._take(listed)

    def _due_in(self) -> float | None:
        """Seconds until a listing can answer a request; None without a request."""
        if not self._requested:
            return None
        # A listing that is made earlier could still contain a total of before the requested moment (broker:
        # totals-listing).
        return min(self._requested.values()) + TOTALS_MAX_AGE - self._clock.monotonic()

    def _take(self, listed: dict[Key, MessageTotal]) -> None:
        """Keep the totals that answer a request. A due queue that is not listed is dropped until it is requested
        again."""
        # Requests newer than this could not be answered by this listing: they wait for the next one.
        latest = self._clock.monotonic() - TOTALS_MAX_AGE
        answered = {
            key: listed[key]
            for key, after in self._requested.items()
            if key in listed and listed[key].sampled_after >= after
        }
        self._requested = {
            key: after
            for key, after in self._requested.items()
            if key not in answered and (key in listed or after > latest)
        }
        # Earlier totals are dropped: the next request names a later moment.
        self._known = answered
        for key in answered:
            self.feed.notify(key)
