"""Into which queues requests may have come back that waited for another attempt: RabbitMQ puts them there, and tells
nobody.

A worker reports that it has sent a request to wait. It comes back to the queue that it was taken from, after the
longest delay of its route at the latest. What waits since before this term, the first looks at the wait queues tell.
Filled by the retry queues loop and by reports of workers, which may get lost. Used by the queue cleaner. Pure.
"""

from __future__ import annotations

import math

from osrdyne.pool.routing.deadlines import Store

MARGIN = 10.0
"""Seconds that a report may be late, and a request on its way out of a wait queue."""
MAX_KNOWN = 10_000


class ReturnedRequests:
    """Of every queue of the pool, in one term. Times are monotonic."""

    def __init__(self) -> None:
        self._until: dict[Store, float] = {}
        self._from_before = math.inf

    def note_sent(self, store: Store, *, at: float, delay: float) -> None:
        """A request of this queue waits for `delay` seconds at most."""
        if len(self._until) >= MAX_KNOWN:
            self._until = {one: until for one, until in self._until.items() if until >= at}
        self._until[store] = max(self._until.get(store, -math.inf), at + delay + MARGIN)

    def note_from_before(self, until: float) -> None:
        """What waits since before this term has come back by then."""
        self._from_before = until + MARGIN

    @property
    def knows_from_before(self) -> bool:
        return self._from_before < math.inf

    def may_have_come(self, store: Store, *, since: float) -> bool:
        """Whether one may have come back to this queue since."""
        return since < max(self._from_before, self._until.get(store, -math.inf))
