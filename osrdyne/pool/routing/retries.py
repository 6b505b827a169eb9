"""Wait queues, where failed requests wait for their next attempt.

`plan_retry_queue` decides about a queue that no route uses any more. `ReturnedRequests` records into which request
queues RabbitMQ may have put requests back after their wait. `RetryQueuesLoop` declares a wait queue for each delay of
the active routes, keeps it for as long as a request accepted earlier may need it, and then deletes it once it is empty.
Workers publish to the wait queues and RabbitMQ expires requests out of them; this module never reads a request.
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

MARGIN = 10.0
"""Seconds that a report may be late, and a request on its way out of a wait queue."""
MAX_KNOWN = 10_000


class ReturnedRequests:
    """Queues into which requests may have come back from a wait queue, in one term. Times are monotonic.

    A worker reports that it has sent a request to a wait queue; it comes back to the queue that it was taken from,
    after the longest delay of its route at the latest. Reports may get lost. Requests that wait since before this term
    are known from the first listings of the wait queues. Used by the queue cleaner.
    """

    def __init__(self) -> None:
        self._until: dict[QueueId, float] = {}
        self._from_before = math.inf

    def note_sent(self, queue: QueueId, *, at: float, delay: float) -> None:
        """A request of this queue waits for `delay` seconds at most."""
        if len(self._until) >= MAX_KNOWN:
            self._until = {one: until for one, until in self._until.items() if until >= at}
        self._until[queue] = max(self._until.get(queue, -math.inf), at + delay + MARGIN)

    def note_from_before(self, until: float) -> None:
        """What waits since before this term has come back by then."""
        self._from_before = until + MARGIN

    @property
    def knows_from_before(self) -> bool:
        return self._from_before < math.inf

    def may_have_come(self, queue: QueueId, *, since: float) -> bool:
        """Whether one may have come back to this queue since."""
        return since < max(self._from_before, self._until.get(queue, -math.inf))


POLL_INTERVAL = 60.0
"""Seconds between two looks at the wait queues that there are."""


class WaitStep(StrEnum):
    """What is next for a wait queue that no route uses."""

    KEEP = "keep"
    UNBIND = "unbind"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Unused:
    """Since when, in this term, no route uses a delay, and when its queue was unbound; both monotonic."""

    since: float
    unbound_at: float | None = None


def plan_retry_queue(
    unused: Unused, totals: QueueTotals, *, now: float, needed_for: float, settle_delay: float
) -> WaitStep:
    """The next step. `needed_for`: how long a request that was accepted before may need the queue.

    Deleted is only what was empty in a sample from after the settle time: RabbitMQ counts there also what it has taken
    out of the queue and not yet delivered (lifecycle: settle, total-for-hidden-messages).
    """
    if now < unused.since + needed_for:
        return WaitStep.KEEP
    if unused.unbound_at is None:
        return WaitStep.UNBIND
    is_empty = totals.is_running and totals.messages == 0
    return WaitStep.DELETE if is_empty and totals.sampled_after >= unused.unbound_at + settle_delay else WaitStep.KEEP


class RetryQueuesLoop:
    """The wait queues of one pool in one term. A direct pool uses none, and may have some from before.

    `refused`: the delays in use whose queue is not ours to use, and why. It is tried again at every look. `waiting`:
    how many requests wait, by delay, at the latest look.
    """

    def __init__(self, context: TermContext, queues: RetryQueues) -> None:
        self._queues = queues
        self.needed_for = context.settings.requests.ttl
        """Seconds for which an accepted request may need a queue that no route uses any more."""
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
        """Have these queues, whoever is going to use them. Raises `BrokerConflictError` for one that is not ours to
        use, unless that is known of a delay in use."""
        async with self._changing:
            refused = await self._queues.declare(delays_ms, priorities)
        for delay_ms in sorted(refused.keys() - self.refused.keys()):
            raise BrokerConflictError(refused[delay_ms])

    async def use(self, delays_ms: Collection[int], priorities: Collection[int]) -> None:
        """From now on there is a queue for each of these delays but those that are refused, and the way back to these
        classes."""
        async with self._changing:
            self.refused = await self._queues.declare(delays_ms, priorities)
            now = self._clock.monotonic()
            self._unused |= {delay_ms: Unused(now) for delay_ms in self._used.difference(delays_ms)}
            self._used, self._levels = frozenset(delays_ms), frozenset(priorities)
            self._unused = {delay_ms: one for delay_ms, one in self._unused.items() if delay_ms not in self._used}

    @property
    def declared(self) -> tuple[frozenset[int], frozenset[int]]:
        """The delays that have a queue, and the classes that requests come back to."""
        return self._used.difference(self.refused), self._levels

    async def declare_again(self) -> None:
        """Something of it was found missing."""
        async with self._changing:
            self.refused = await self._queues.declare(self._used, self._levels)

    async def use_none(self) -> None:
        """The pool is a direct one: what waits from before passes the controller when it comes back."""
        await self._queues.leave_default_class()

    async def run(self, on_change: Callable[[], None]) -> None:
        """Look after the queues that there are, for ever. `on_change` is called when what is refused may have
        changed."""
        while True:
            try:
                await self.reconcile()
                on_change()
            except BrokerError as error:
                self._log.warning("wait queues cannot be looked at", error=str(error))
            await self._clock.sleep(POLL_INTERVAL)

    async def reconcile(self) -> None:
        """One pass."""
        used_before = self._used
        listed = await self._queues.list()
        self._note_from_before(listed)
        counts = {delay_ms: totals.messages for delay_ms, totals in listed.items() if delay_ms not in self.refused}
        self.waiting = {delay_ms: count for delay_ms, count in sorted(counts.items()) if count is not None}
        async with self._changing:
            missing = (used_before & self._used) - listed.keys() - self.refused.keys()
            if missing:
                self._log.error("wait queue is gone, somebody else deleted it", delays_ms=sorted(missing))
            if missing or self.refused:
                self.refused = await self._queues.declare(self._used, self._levels)
            now = self._clock.monotonic()
            found = listed.keys() - self._used
            self._unused = {delay_ms: self._unused.get(delay_ms, Unused(now)) for delay_ms in sorted(found)}
            for delay_ms, unused in list(self._unused.items()):
                await self._take_step(delay_ms, unused, listed[delay_ms])

    def _note_from_before(self, listed: Mapping[int, QueueTotals]) -> None:
        """By a listing that is not from before this term."""
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
            case WaitStep.KEEP:
                pass
            case WaitStep.UNBIND:
                await self._queues.unbind(delay_ms)
                self._unused[delay_ms] = replace(unused, unbound_at=self._clock.monotonic())
            case WaitStep.DELETE:
                outcome = await self._queues.delete_if_proven_empty(delay_ms)
                self._log.info("wait queue that no route uses", delay_ms=delay_ms, outcome=outcome.value)
