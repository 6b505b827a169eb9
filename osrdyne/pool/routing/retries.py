"""Retry queues, where failed requests wait for their next attempt.

`plan_retry_queue` decides about a queue that no route uses any more. `ReturnedRequests` records into which request
queues RabbitMQ may have put requests back after their wait. `RetryQueuesLoop` declares a retry queue for each delay of
the active routes, keeps it for as long as a request accepted earlier may need it, and then deletes it once it is empty.
Workers publish to the retry queues and RabbitMQ expires requests out of them; this module never reads a request.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from osrdyne.broker.management.models import QueueTotals
from osrdyne.errors import BrokerConflictError, BrokerError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import RetryQueues
from osrdyne.protocol.names import QueueId

MARGIN = 10.0  # Seconds that a report, or a request on its way out of a retry queue, may be late.
MAX_KNOWN = 10_000


class ReturnedRequests:
    """Queues into which requests may have come back from a retry queue, in one term. Times are monotonic.

    A worker reports that it has sent a request to a retry queue; it comes back to the queue from which it was taken,
    after the longest delay of its route at the latest. Reports may get lost. Requests that wait since before this term
    are known from the first listings of the retry queues. Used by the sweeper of expired requests.
    """

    def __init__(self) -> None:
        self._until: dict[QueueId, float] = {}
        self._from_before = math.inf

    def note_sent(self, queue: QueueId, *, at: float, delay: float) -> None:
        """Record that a request of this queue waits for at most `delay` seconds."""
        if len(self._until) >= MAX_KNOWN:
            self._until = {one: until for one, until in self._until.items() if until >= at}
        # The latest one counts: an earlier report does not shorten the wait that a later one has announced.
        self._until[queue] = max(self._until.get(queue, -math.inf), at + delay + MARGIN)

    def note_from_before(self, until: float) -> None:
        """Record when requests that wait since before this term will have come back."""
        self._from_before = until + MARGIN

    @property
    def knows_from_before(self) -> bool:
        return self._from_before < math.inf

    def may_have_come(self, queue: QueueId, *, since: float) -> bool:
        """Whether a request may have come back to this queue since then."""
        return since < max(self._from_before, self._until.get(queue, -math.inf))


POLL_INTERVAL = 60.0  # Seconds between two passes over the retry queues.


class RetryQueueStep(StrEnum):
    """The next step for a retry queue that no route uses."""

    KEEP = "keep"
    UNBIND = "unbind"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Unused:
    """Since when no route uses a delay in this term, and when its queue was unbound; both monotonic."""

    since: float
    unbound_at: float | None = None


def plan_retry_queue(
    unused: Unused, totals: QueueTotals, *, now: float, needed_for: float, settle_delay: float
) -> RetryQueueStep:
    """Return the next step. `needed_for`: how long a request that was accepted before may need the queue.

    A queue is deleted only if it was empty in a sample from after the settle time. Such a sample includes requests that
    RabbitMQ has taken out of the queue and not yet delivered (lifecycle: settle, total-for-hidden-messages).
    """
    # A request that was accepted under the old routes still carries their terms, and a worker publishes it there.
    if now < unused.since + needed_for:
        return RetryQueueStep.KEEP
    if unused.unbound_at is None:
        return RetryQueueStep.UNBIND
    is_empty = totals.is_running and totals.messages == 0
    return (
        RetryQueueStep.DELETE
        if is_empty and totals.sampled_after >= unused.unbound_at + settle_delay
        else RetryQueueStep.KEEP
    )


class RetryQueuesLoop:
    """The retry queues of one pool in one term. A direct pool uses none, and may have some from before.

    `refused`: used delays whose queue exists with other arguments, with the reason; retried in every pass. `waiting`:
    the number of waiting requests by delay, as of the latest pass.
    """

    def __init__(self, context: TermContext, queues: RetryQueues) -> None:
        self._queues = queues
        # Seconds for which an accepted request may need a queue that no route uses any more.
        self.needed_for = context.settings.requests.ttl
        self._settle_delay = context.settings.lifecycle.settle_delay
        self._clock = context.clock
        self._since = context.clock.monotonic()
        self.returned = ReturnedRequests()
        self._used: frozenset[int] = frozenset()
        self._levels: frozenset[int] = frozenset()
        self.refused: Mapping[int, str] = {}
        self.waiting: Mapping[int, int] = {}
        self._unused: dict[int, Unused] = {}
        self._changing = asyncio.Lock()
        self._log: Logger = get_logger("retry_queues")

    async def declare(self, delays_ms: Collection[int], priorities: Collection[int]) -> None:
        """Declare these queues, for routes that are not active yet. Raises `BrokerConflictError` if one exists with
        other arguments, unless that is known of a used delay."""
        async with self._changing:
            refused = await self._queues.declare(delays_ms, priorities)
        for delay_ms in sorted(refused.keys() - self.refused.keys()):
            raise BrokerConflictError(refused[delay_ms])

    async def use(self, delays_ms: Collection[int], priorities: Collection[int]) -> None:
        """Use a queue for each of these delays except refused ones, and the bindings by which requests return to
        these priority levels."""
        async with self._changing:
            self.refused = await self._queues.declare(delays_ms, priorities)
            # From now on: the queues of earlier routes stay as long as an accepted request may need them.
            now = self._clock.monotonic()
            self._unused |= {delay_ms: Unused(now) for delay_ms in self._used.difference(delays_ms)}
            self._used, self._levels = frozenset(delays_ms), frozenset(priorities)
            self._unused = {delay_ms: one for delay_ms, one in self._unused.items() if delay_ms not in self._used}

    @property
    def declared(self) -> tuple[frozenset[int], frozenset[int]]:
        """The delays that have a queue, and the levels to which requests return."""
        return self._used.difference(self.refused), self._levels

    async def declare_again(self) -> None:
        """Declare all used queues again, because an object was found missing."""
        async with self._changing:
            self.refused = await self._queues.declare(self._used, self._levels)

    async def use_none(self) -> None:
        """Prepare a direct pool: requests that wait from before pass through the controller when they come back."""
        await self._queues.leave_default_level()

    async def run(self, on_change: Callable[[], None]) -> None:
        """Maintain the existing queues. Runs until cancelled. Calls `on_change` when the refused delays may have
        changed."""
        while True:
            try:
                await self.reconcile()
                on_change()
            except BrokerError as error:
                self._log.warning("retry queues not checked", error=str(error))
            await self._clock.sleep(POLL_INTERVAL)

    async def reconcile(self) -> None:
        """Check the retry queues once."""
        # Compared with the listing below: a delay that came into use meanwhile is not missing in it.
        used_before = self._used
        listed = await self._queues.list()
        self._note_from_before(listed)
        counts = {delay_ms: totals.messages for delay_ms, totals in listed.items() if delay_ms not in self.refused}
        self.waiting = {delay_ms: count for delay_ms, count in sorted(counts.items()) if count is not None}
        async with self._changing:
            missing = (used_before & self._used) - listed.keys() - self.refused.keys()
            if missing:
                self._log.warning("retry queue was deleted by another client", delays_ms=sorted(missing))
            if missing or self.refused:
                self.refused = await self._queues.declare(self._used, self._levels)
            now = self._clock.monotonic()
            found = listed.keys() - self._used
            self._unused = {delay_ms: self._unused.get(delay_ms, Unused(now)) for delay_ms in sorted(found)}
            for delay_ms, unused in list(self._unused.items()):
                await self._take_step(delay_ms, unused, listed[delay_ms])

    def _note_from_before(self, listed: Mapping[int, QueueTotals]) -> None:
        """Record the waits from before this term, by a listing that was sampled in this term."""
        if self.returned.knows_from_before or any(one.sampled_after < self._since for one in listed.values()):
            return
        waits = [delay_ms / 1000 for delay_ms, totals in listed.items() if totals.messages != 0]
        self.returned.note_from_before(self._clock.monotonic() + max(waits, default=0.0))

    async def _take_step(self, delay_ms: int, unused: Unused, totals: QueueTotals) -> None:
        step = plan_retry_queue(
            unused,
            totals,
            now=self._clock.monotonic(),
            needed_for=self.needed_for,
            settle_delay=self._settle_delay,
        )
        match step:
            case RetryQueueStep.KEEP:
                pass
            case RetryQueueStep.UNBIND:
                # Crash after it: the next leader finds the queue, unused, and begins with the wait again.
                await self._queues.unbind(delay_ms)
                self._unused[delay_ms] = replace(unused, unbound_at=self._clock.monotonic())
            case RetryQueueStep.DELETE:
                # The sample above shows what RabbitMQ holds in between; the probe shows the rest (lifecycle: probe).
                outcome = await self._queues.delete_if_proven_empty(delay_ms)
                self._log.info("unused retry queue processed", delay_ms=delay_ms, outcome=outcome.value)
