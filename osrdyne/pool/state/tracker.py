"""The pool state tracker: the only writer of what is expected of every group.

Orphan and activity processors require groups, timers move them on, the two loops read what is expected and converge
on it per key. An event costs O(1), a transition by time O(log n): each key has one entry in a heap, which is looked
at again only when its time has come (so that steady use of a key moves nothing). It does no I/O.
Source: docs/explanation/life-of-a-key.md, the OSRD reference, lifecycle: pin-until-forwarded, always-unbind,
idle-needs-a-fresh-total.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from osrdyne.aio.clock import Clock
from osrdyne.aio.signals import ChangeFeed, Subscription, Wakeup
from osrdyne.pool.state import groups
from osrdyne.pool.state.groups import Delays, GroupRecord, GroupStatus
from osrdyne.protocol.control import Generation
from osrdyne.protocol.names import Key


@dataclass(slots=True)
class _Group:
    """All that is known of one key, in one object: with many keys, what an event costs is mostly memory to be fetched.

    The first four are those of `GroupRecord`. `generation`: of the latest change of what is expected. `check_at`: time
    of the key's entry in the heap.
    """

    status: GroupStatus
    last_activity: float
    active_until: float
    stop_at: float
    generation: int = 0
    check_at: float = math.inf

    @classmethod
    def of(cls, record: GroupRecord) -> _Group:
        return cls(record.status, record.last_activity, record.active_until, record.stop_at)

    def record(self) -> GroupRecord:
        return GroupRecord(self.status, self.last_activity, self.active_until, self.stop_at)

    def write(self, record: GroupRecord) -> None:
        self.status, self.last_activity = record.status, record.last_activity
        self.active_until, self.stop_at = record.active_until, record.stop_at


class PoolStateTracker:
    """The expected state of the pool during one term."""

    def __init__(self, *, term: int, delays: Delays, clock: Clock, pinned: Iterable[Key] = ()) -> None:
        self._term = term
        self._counter = 0
        self._delays = delays
        self._clock = clock
        self._groups: dict[Key, _Group] = {}
        self._timers: list[tuple[float, Key]] = []
        self._holds: Counter[Key] = Counter()
        self._pinned: set[Key] = set()
        self._stop_due: set[Key] = set()
        self._retired: set[Key] = set()
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
        group = self._groups.get(key)
        return Generation(self._term, 0 if group is None else group.generation)

    def status(self, key: Key) -> GroupStatus | None:
        """What is expected of the group; None: neither workers nor queue."""
        group = self._groups.get(key)
        return None if group is None else group.status

    def record(self, key: Key) -> GroupRecord | None:
        group = self._groups.get(key)
        return None if group is None else group.record()

    def keys(self) -> list[Key]:
        return list(self._groups)

    def __len__(self) -> int:
        """How many groups something is expected of."""
        return len(self._groups)

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

        Returns the generation since which it has been. Source: the OSRD reference, `PoolStateTracker`.
        """
        group = self._groups.get(key)
        now = self._clock.monotonic()
        if group is not None and group.status is GroupStatus.ACTIVE:
            # By far the most events. Its timer runs already, and looks again when it finds more time.
            group.last_activity = now
            group.active_until = groups.active_until(now, group.active_until, self._delays, extra_lifetime)
        else:
            before = None if group is None else group.record()
            record = groups.require(before, now=now, delays=self._delays, extra_lifetime=extra_lifetime)
            group = self._put(key, group, record, changed=True)
        return Generation(self._term, group.generation)

    def adopt(self, key: Key, status: GroupStatus) -> None:
        """Take over a group found on the broker, unless the key is known already."""
        if key not in self._groups:
            record = groups.adopt(status, now=self._clock.monotonic(), delays=self._delays)
            self._put(key, None, record, changed=True)

    def hold(self, key: Key) -> None:
        """Keep the key ACTIVE until `release`: an orphan of it waits to be forwarded (lifecycle: pin-until-forwarded).
        Counted."""
        self._holds[key] += 1

    def release(self, key: Key) -> None:
        self._holds[key] -= 1
        if self._holds[key] <= 0:
            del self._holds[key]
            if (group := self._groups.get(key)) is not None:
                self._arm(key, group, group.record().due_at)

    def pin(self, key: Key) -> None:
        """Keep the group ACTIVE until `unpin`."""
        self._pinned.add(key)
        self.require_worker_group(key)
        self._feed.notify(key)  # a start that had failed is now tried again without a request

    def unpin(self, key: Key) -> None:
        """Let the idle clock of the key run again, from now."""
        if key in self._pinned:
            self._pinned.discard(key)
            self.require_worker_group(key)
            group = self._groups[key]
            self._arm(key, group, group.record().due_at)

    def retire(self, key: Key) -> bool:
        """Unbind the group now and look into its end as soon as that is safe. False when it is held or pinned.

        It stays retired until it is required again; a request is a reason for that, what its workers still do is none.
        """
        group = self._groups.get(key)
        if group is None or self._stays(key):
            return False
        now = self._clock.monotonic()
        retired = groups.unbind(group.record(), now=now, delays=Delays(self._delays.unbind, 0.0))
        self._put(key, group, retired, changed=group.status is not GroupStatus.UNBOUND)
        self._retired.add(key)
        return True

    def is_retired(self, key: Key) -> bool:
        """Whether the group is to end as soon as its requests are done."""
        return key in self._retired

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
        self._retired.discard(key)
        del self._groups[key]
        self._counter += 1
        self._feed.notify(key)
        return True

    # --- time

    def advance(self) -> None:
        """Make the transitions that are due by now."""
        now = self._clock.monotonic()
        while self._timers and self._timers[0][0] <= now:
            at, key = heapq.heappop(self._timers)
            group = self._groups.get(key)
            if group is None or group.check_at != at:
                continue  # gone, or an earlier look took its place
            group.check_at = math.inf
            if self._stays(key):
                continue
            record = group.record()
            if not groups.is_due(record, now=now):
                self._arm(key, group, record.due_at)
            elif record.status is GroupStatus.ACTIVE:
                self._put(key, group, groups.unbind(record, now=now, delays=self._delays), changed=True)
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

    def _put(self, key: Key, group: _Group | None, record: GroupRecord, *, changed: bool) -> _Group:
        """Write the record of a group, the present one or (None) a new one."""
        if group is None:
            group = self._groups[key] = _Group.of(record)
        else:
            group.write(record)
        self._stop_due.discard(key)
        self._retired.discard(key)
        if changed:
            self._counter += 1
            group.generation = self._counter
            self._feed.notify(key)
        self._arm(key, group, record.due_at)
        return group

    def _arm(self, key: Key, group: _Group, due_at: float) -> None:
        """See to it that the key is looked at when its next transition is due, or before."""
        if group.check_at <= due_at or self._stays(key):
            return
        group.check_at = due_at
        heapq.heappush(self._timers, (due_at, key))
        if self._timers[0][1] == key:
            self._wakeup.set()
