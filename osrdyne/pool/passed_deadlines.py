"""The deadlines of what was passed on to each queue, in order: where does something expired wait behind the head?

RabbitMQ removes what has expired at the head of a queue by itself. Only where something unexpired is in front of it has
the queue to be looked through, which costs reading and writing all of it. The ingress notes what it passes on, a
listing tells how many of the last ones wait. Pure; no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from osrdyne.protocol.deadlines import is_past
from osrdyne.protocol.names import Key

Store = tuple[Key, int | None]

MAX_KNOWN = 20_000
"""Deadlines of one queue; what was passed on before those is not known any more."""
SPARE = 100
"""How many more than twice those that wait are remembered: a listing is some seconds old."""


class PassedDeadlines:
    """Of every queue of the pool, in one term. What an earlier leader passed on is not known."""

    def __init__(self, *, skew_ms: int) -> None:
        self._skew_ms = skew_ms
        self._passed: dict[Store, deque[int | None]] = {}

    def note(self, store: Store, deadline_ms: int | None) -> None:
        """A request was passed on to the queue."""
        self._passed.setdefault(store, deque(maxlen=MAX_KNOWN)).append(deadline_ms)

    def replace(self, store: Store, deadlines_ms: Iterable[int | None]) -> None:
        """The queue was looked through, and this is what it holds."""
        self._passed[store] = deque(deadlines_ms, maxlen=MAX_KNOWN)

    def keep_only(self, stores: Iterable[Store]) -> None:
        """Forget the queues of groups that are over."""
        for store in self._passed.keys() - set(stores):
            del self._passed[store]

    def may_hide_expired(self, store: Store, waiting: int, *, now_ms: int) -> bool:
        """Whether of `waiting` requests one has expired behind one that has not; also when that is not known."""
        passed = self._passed.get(store, deque())
        if waiting < 2:
            hides = False
        elif waiting > len(passed):
            hides = True
        else:
            ones = islice(passed, len(passed) - waiting, None)
            past = [is_past(one, now_ms=now_ms, skew_ms=self._skew_ms) for one in ones]
            hides = False in past and True in past[past.index(False) :]
        while len(passed) > 2 * waiting + SPARE:
            passed.popleft()
        return hides
