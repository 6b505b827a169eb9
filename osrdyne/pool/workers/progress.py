"""Position and expected time of the start of a key, for callers that ask. Reads the state of the term, changes nothing.

A start that waits under `max_concurrent_starts` begins when one before it is over. Each is expected to take as long as
the latest starts did. The order is the one in which the worker groups loop starts keys: by the priority of their
requests, then in the order in which they became ready for a start. The queue of a later request may be declared first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from osrdyne.drivers.base import InstanceState
from osrdyne.pool.context import TermContext, TermState
from osrdyne.pool.state.workers.instances import InventoryEntry
from osrdyne.protocol.names import Key
from osrdyne.protocol.progress import StartProgress

# Seconds for which the order of the starts is not computed again, however many callers ask.
FRESH = 0.5
MAX_GROUPS, MAX_STARTS = "max_groups", "max_concurrent_starts"


@dataclass(frozen=True, slots=True)
class _Order:
    """The starts at one moment. Positions begin at 1. `typical`: seconds of a start. `remaining`: of those in
    progress, in ascending order."""

    at: float
    starts: Mapping[Key, int] = field(default_factory=dict)
    groups: Mapping[Key, int] = field(default_factory=dict)
    typical: float | None = None
    remaining: Sequence[float] = ()


class StartForecast:
    """The starts of one term."""

    def __init__(
        self, context: TermContext, state: TermState, *, start_queue: Callable[[], list[Key]], manages_workers: bool
    ) -> None:
        self._clock = context.clock
        self._places = context.settings.lifecycle.max_concurrent_starts
        self._state = state
        self._start_queue = start_queue
        self._manages_workers = manages_workers
        self._order = _Order(-math.inf)

    def of(self, key: Key) -> StartProgress | None:
        """The start that requests of a key wait for; None if they wait for none: a worker serves, the start has
        failed, or the key has no group."""
        state, workers = self._state, self._state.worker_status[key]
        if not self._manages_workers or state.tracker.status(key) is None or workers.failure is not None:
            return None
        running = [entry for entry in state.instances.of_key(key) if entry.instance.state is InstanceState.RUNNING]
        if any(self._serves(entry) for entry in running):
            return None
        order = self._fresh_order()
        if not state.admission.is_admitted(key):
            # When a place becomes free depends on the callers of other keys: no time can be estimated.
            return StartProgress(order.groups.get(key, len(order.groups) + 1), None, MAX_GROUPS)
        if not running and workers.waiting_for == MAX_STARTS:
            position = order.starts.get(key, len(order.starts) + 1)
            return StartProgress(position, _eta_of_waiting(position, order, places=self._places), MAX_STARTS)
        waiting_for = next((why for entry in running if (why := self._reported_wait(entry)) is not None), None)
        return StartProgress(0, self._eta_of_starting(key, running, order.typical), waiting_for)

    def _serves(self, entry: InventoryEntry) -> bool:
        reported = self._state.worker_reports[entry.instance.worker_id]
        return entry.served or (reported is not None and reported.state.serves)

    def _reported_wait(self, entry: InventoryEntry) -> str | None:
        reported = self._state.worker_reports[entry.instance.worker_id]
        return None if reported is None else reported.waiting_for

    def _eta_of_starting(self, key: Key, running: list[InventoryEntry], typical: float | None) -> float | None:
        if typical is None:
            return None
        pause = 0.0
        if not running and (until := self._state.restarts[key].back_off_until) is not None:
            pause = max(0.0, until - self._clock.monotonic())
        remaining = typical - max((self._elapsed(entry) for entry in running), default=0.0)
        # The end of a start that takes longer than the others cannot be estimated.
        return None if remaining < 0 else pause + remaining

    def _elapsed(self, entry: InventoryEntry) -> float:
        # By the wall clock of the start: a new leader may have first seen a worker that has been loading for long.
        return max(0.0, self._clock.time() - entry.instance.started_at)

    def _fresh_order(self) -> _Order:
        now = self._clock.monotonic()
        if now - self._order.at >= FRESH:
            typical = self._state.start_durations.typical()
            loading = self._state.instances.loading_entries()
            self._order = _Order(
                now,
                starts={key: number for number, key in enumerate(self._start_queue(), start=1)},
                groups={key: number for number, key in enumerate(self._state.admission.waiting(), start=1)},
                typical=typical,
                remaining=sorted(max(0.0, (typical or 0.0) - self._elapsed(entry)) for entry in loading),
            )
        return self._order


def _eta_of_waiting(position: int, order: _Order, *, places: int) -> float | None:
    """Seconds until the start at this position is over, if each takes as long as the others did."""
    if order.typical is None:
        return None
    # Starts in progress that no listing shows yet have just begun.
    begun = [*order.remaining[:places], *[order.typical] * (places - len(order.remaining))]
    rounds, place = divmod(position - 1, places)
    return begun[place] + (rounds + 1) * order.typical
