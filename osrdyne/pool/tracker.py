"""The pool state tracker: the only writer of what is expected of every group.

Orphan and activity processors require groups, timers move them on, the two loops read what is expected and converge
on it per key. An event costs O(1), a transition by time O(log n): each key has one entry in a heap, which is looked
at again only when its time has come (so that steady use of a key moves nothing). It does no I/O.
Source: ARCHITECTURE "Pool state tracker", seed 004, LIFECYCLE 12, 19, 21.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping

from osrdyne.aio.changes import ChangeFeed, Subscription
from osrdyne.aio.clock import Clock
from osrdyne.aio.wakeup import Wakeup
from osrdyne.pool import state
from osrdyne.pool.state import Delays, GroupRecord, GroupStatus
from osrdyne.protocol.control import Generation
from osrdyne.protocol.names import Key


class PoolStateTracker:
    """The expected state of the pool during one term."""

    def __init__(self, *, term: int, delays: Delays, clock: Clock, pinned: Iterable[Key] = ()) -> None:
        self._term = term
        self._counter = 0
        self._delays = delays
        self._clock = clock
        self._groups: dict[Key, GroupRecord] = {}
        self._generations: dict[Key, int] = {}
        self._timers: list[tuple[float, Key]] = []
        self._timed: dict[Key, float] = {}
        self._holds: Counter[Key] = Counter()
        self._pinned: set[Key] = set()
        self._stop_due: set[Key] = set()
        self._feed: ChangeFeed[Key] = ChangeFeed()
        self._wakeup = Wakeup(clock)
        self.stop_due = Wakeup(clock)
        """Set whenever a group becomes due for the question whether its workers may be stopped."""
        for key in pinned:
            self.pin(key)

    # --- reading

    @property
    def generation(self) -> Generation:
        return Generation(self._term, self._counter)

    def generation_of(self, key: Key) -> Generation:
        """The generation of the latest change of what is expected of `key`."""
        return Generation(self._term, self._generations.get(key, 0))

    def status(self, key: Key) -> GroupStatus | None:
        """What is expected of the group; None: neither workers nor queue."""
        record = self._groups.get(key)
        return None if record is None else record.status

    def record(self, key: Key) -> GroupRecord | None:
        return self._groups.get(key)

    def keys(self) -> list[Key]:
        return list(self._groups)

    def __len__(self) -> int:
        """How many groups something is expected of."""
        return len(self._groups)

    def snapshot(self) -> Mapping[Key, GroupStatus]:
        """The whole expected state now."""
        return {key: record.status for key, record in self._groups.items()}

    def is_pinned(self, key: Key) -> bool:
        return key in self._pinned

    def is_held(self, key: Key) -> bool:
        return key in self._holds

    def subscribe(self) -> Subscription[Key]:
        """The keys whose expected state changes from now on; all present ones count as changed."""
        return self._feed.subscribe(already=self._groups)

    # --- events

    def require_worker_group(self, key: Key, extra_lifetime: float = 0.0) -> Generation:
        """The group is needed: it is ACTIVE for `unbind_delay` + `extra_lifetime` seconds from now on.

        Returns the generation since which it has been. Source: seed 004, `PoolStateTracker`.
        """
        before = self._groups.get(key)
        record = state.require(before, now=self._clock.monotonic(), delays=self._delays, extra_lifetime=extra_lifetime)
        self._put(key, record, changed=before is None or before.status is not GroupStatus.ACTIVE)
        return self.generation_of(key)

    def adopt(self, key: Key, status: GroupStatus) -> None:
        """Take over a group found on the broker, unless the key is known already."""
        if key not in self._groups:
            record = state.adopt(status, now=self._clock.monotonic(), delays=self._delays)
            self._put(key, record, changed=True)

    def hold(self, key: Key) -> None:
        """Keep the key ACTIVE until `release`: an orphan of it waits to be forwarded (LIFECYCLE 12). Counted."""
        self._holds[key] += 1

    def release(self, key: Key) -> None:
        self._holds[key] -= 1
        if self._holds[key] <= 0:
            del self._holds[key]
            self._arm(key)

    def pin(self, key: Key) -> None:
        """Keep the group ACTIVE until `unpin`."""
        self._pinned.add(key)
        self.require_worker_group(key)

    def unpin(self, key: Key) -> None:
        """Let the idle clock of the key run again, from now."""
        if key in self._pinned:
            self._pinned.discard(key)
            self.require_worker_group(key)

    def retire(self, key: Key) -> bool:
        """Unbind the group now and look into its end as soon as that is safe. False when it is held or pinned."""
        record = self._groups.get(key)
        if record is None or self._stays(key):
            return False
        now = self._clock.monotonic()
        retired = state.unbind(record, now=now, delays=Delays(self._delays.unbind, 0.0))
        self._put(key, retired, changed=record.status is not GroupStatus.UNBOUND)
        return True

    def stop_due_keys(self) -> set[Key]:
        """The UNBOUND groups whose `stop_delay` is over: their workers may be stopped if their queues are empty."""
        return set(self._stop_due)

    def end(self, key: Key) -> bool:
        """The queue of an UNBOUND group was proven empty: nothing is expected of the key any more.

        False, and nothing is changed, when the group has been required since it became due.
        """
        if key not in self._stop_due or self._stays(key):
            return False
        self._stop_due.discard(key)
        del self._groups[key]
        self._changed(key)
        return True

    # --- time

    def advance(self) -> None:
        """Make the transitions that are due by now."""
        now = self._clock.monotonic()
        while self._timers and self._timers[0][0] <= now:
            at, key = heapq.heappop(self._timers)
            if self._timed.get(key) != at:
                continue  # an earlier look took its place
            del self._timed[key]
            record = self._groups.get(key)
            if record is None or self._stays(key):
                continue
            if not state.is_due(record, now=now):
                self._arm(key)
            elif record.status is GroupStatus.ACTIVE:
                self._put(key, state.unbind(record, now=now, delays=self._delays), changed=True)
            else:
                self._stop_due.add(key)
                self.stop_due.set()

    def next_due(self) -> float | None:
        """Monotonic time of the next look, or None when no timer runs."""
        return self._timers[0][0] if self._timers else None

    async def run(self) -> None:
        """Make transitions when they are due, for ever."""
        while True:
            self.advance()
            due = self.next_due()
            await self._wakeup.wait(None if due is None else max(0.0, due - self._clock.monotonic()))

    # --- the inside

    def _stays(self, key: Key) -> bool:
        return key in self._pinned or key in self._holds

    def _put(self, key: Key, record: GroupRecord, *, changed: bool) -> None:
        self._groups[key] = record
        self._stop_due.discard(key)
        if changed:
            self._changed(key)
        self._arm(key)

    def _changed(self, key: Key) -> None:
        self._counter += 1
        if key in self._groups:
            self._generations[key] = self._counter
        else:
            self._generations.pop(key, None)
        self._feed.notify(key)

    def _arm(self, key: Key) -> None:
        """See to it that the key is looked at when its next transition is due, or before."""
        record = self._groups.get(key)
        if record is None or self._stays(key) or self._timed.get(key, math.inf) <= record.due_at:
            return
        self._timed[key] = record.due_at
        heapq.heappush(self._timers, (record.due_at, key))
        if self._timers[0][1] == key:
            self._wakeup.set()
