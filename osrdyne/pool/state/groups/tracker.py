"""The pool state tracker: the only writer of the desired state of every group.

Orphan and activity processors require groups, timers move them on, and the two loops read the desired state and
converge on it per key. An event costs O(1), a transition by time O(log n): each key has one entry in a heap, which is
examined only when its time has come, so that steady use of a key changes nothing in the heap. No I/O. Source:
docs/explanation/life-of-a-key.md, the OSRD reference, lifecycle: pin-until-forwarded, always-unbind,
idle-needs-a-fresh-total.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from osrdyne.aio.clock import Clock
from osrdyne.aio.signals import ChangeFeed, Subscription, Wakeup
from osrdyne.pool.state.groups import transitions
from osrdyne.pool.state.groups.transitions import Delays, GroupRecord, GroupStatus
from osrdyne.protocol.control import Generation
from osrdyne.protocol.names import Key


@dataclass(slots=True)
class _Group:
    """All state of one key in one object: with many keys, the cost of an event is mostly memory access.

    The first four fields are those of `GroupRecord`. `generation`: of the latest change of the desired state.
    `check_at`: time of the key's entry in the heap.
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
    """The desired state of the pool during one term."""

    def __init__(
        self,
        *,
        term: int,
        delays: Delays | Callable[[Key], Delays],
        clock: Clock,
        pinned: Iterable[Key] = (),
        waits: Callable[[Key], bool] = lambda key: False,
    ) -> None:
        """`delays`: those of all groups, or of each key. A change of them counts from the next event of a group.
        `waits`: whether a group waits for a place; such a group is not idle."""
        self._term = term
        self._counter = 0
        self._delays_of: Callable[[Key], Delays] = delays if callable(delays) else lambda key: delays
        self._clock = clock
        self._waits = waits
        self._groups: dict[Key, _Group] = {}
        self._timers: list[tuple[float, Key]] = []
        self._holds: Counter[Key] = Counter()
        self._pinned: set[Key] = set()
        self._stop_due: set[Key] = set()
        self._retired: set[Key] = set()
        self._feed: ChangeFeed[Key] = ChangeFeed()
        self._wakeup = Wakeup(clock)
        # Set when a group becomes due, so that its workers may be stopped if its queue is empty.
        self.stop_due = Wakeup(clock)
        for key in pinned:
            self.pin(key)

    # --- reading

    @property
    def generation(self) -> Generation:
        return Generation(self._term, self._counter)

    def generation_of(self, key: Key) -> Generation:
        """The generation of the latest change of the desired state of `key`."""
        group = self._groups.get(key)
        return Generation(self._term, 0 if group is None else group.generation)

    def status(self, key: Key) -> GroupStatus | None:
        """The desired state of the group; None: neither workers nor queue."""
        group = self._groups.get(key)
        return None if group is None else group.status

    def record(self, key: Key) -> GroupRecord | None:
        group = self._groups.get(key)
        return None if group is None else group.record()

    def keys(self) -> list[Key]:
        return list(self._groups)

    def __len__(self) -> int:
        """The number of desired groups."""
        return len(self._groups)

    def is_pinned(self, key: Key) -> bool:
        return key in self._pinned

    def is_held(self, key: Key) -> bool:
        return key in self._holds

    def subscribe(self) -> Subscription[Key]:
        """Subscribe to keys whose desired state changes; all present keys count as changed."""
        return self._feed.subscribe(already=self._groups)

    # --- events

    def require_worker_group(self, key: Key, extra_lifetime: float = 0.0) -> Generation:
        """Require the group: it is ACTIVE for `unbind_delay` + `extra_lifetime` seconds from now.

        Returns the generation since which it has been ACTIVE. Source: the OSRD reference, `PoolStateTracker`.
        """
        group = self._groups.get(key)
        now = self._clock.monotonic()
        if group is not None and group.status is GroupStatus.ACTIVE:
            # The most frequent event by far. The timer runs already, and is extended when it fires.
            group.last_activity = now
            group.active_until = transitions.active_until(now, group.active_until, self._delays_of(key), extra_lifetime)
        else:
            before = None if group is None else group.record()
            record = transitions.require(before, now=now, delays=self._delays_of(key), extra_lifetime=extra_lifetime)
            group = self._put(key, group, record, changed=True)
        return Generation(self._term, group.generation)

    def adopt(self, key: Key, status: GroupStatus) -> None:
        """Take over a group found in RabbitMQ, unless the key is known already."""
        if key not in self._groups:
            record = transitions.adopt(status, now=self._clock.monotonic(), delays=self._delays_of(key))
            self._put(key, None, record, changed=True)

    def hold(self, key: Key) -> None:
        """Keep the key ACTIVE until `release`, while an orphan waits to be forwarded (lifecycle:
        pin-until-forwarded). Holds are counted."""
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
        """Unpin the group; its idle time starts now."""
        if key in self._pinned:
            self._pinned.discard(key)
            self.require_worker_group(key)
            group = self._groups[key]
            self._arm(key, group, group.record().due_at)

    def retire(self, key: Key) -> bool:
        """Unbind the group now and end it as soon as that is safe. False if it is held or pinned.

        It stays retired until a request requires it again; activity of its workers does not.
        """
        group = self._groups.get(key)
        if group is None or self._stays(key):
            return False
        now = self._clock.monotonic()
        retired = transitions.unbind(group.record(), now=now, delays=Delays(self._delays_of(key).unbind, 0.0))
        self._put(key, group, retired, changed=group.status is not GroupStatus.UNBOUND)
        self._retired.add(key)
        return True

    def is_retired(self, key: Key) -> bool:
        """Whether the group is to end as soon as its requests are completed."""
        return key in self._retired

    def stop_due_keys(self) -> set[Key]:
        """The UNBOUND groups whose `stop_delay` is over: their workers may be stopped if their queues are empty."""
        return set(self._stop_due)

    def end(self, key: Key) -> bool:
        """Forget an UNBOUND group whose queue was proven empty: neither workers nor queue are desired any more.

        Returns False and changes nothing if the group has been required since it became due.
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
                continue  # gone, or replaced by an earlier entry
            group.check_at = math.inf
            if self._stays(key):
                continue  # `release` and `unpin` schedule the next check
            record = group.record()
            if not transitions.is_due(record, now=now):
                self._arm(key, group, record.due_at)
            elif record.status is GroupStatus.ACTIVE and self._waits(key):
                # Its requests would only be bound again; `GroupEviction` retires it when they are gone.
                kept = transitions.keep_active(record, now=now, delays=self._delays_of(key))
                self._put(key, group, kept, changed=False)
            elif record.status is GroupStatus.ACTIVE:
                self._put(key, group, transitions.unbind(record, now=now, delays=self._delays_of(key)), changed=True)
            else:
                self._stop_due.add(key)
                self.stop_due.set()

    def next_due(self) -> float | None:
        """Monotonic time of the next check; None if no timer runs."""
        return self._timers[0][0] if self._timers else None

    async def run(self) -> None:
        """Make transitions when they are due. Runs until cancelled."""
        while True:
            self.advance()
            due = self.next_due()
            await self._wakeup.wait(None if due is None else max(0.0, due - self._clock.monotonic()))

    # --- internals

    def _stays(self, key: Key) -> bool:
        return key in self._pinned or key in self._holds

    def _put(self, key: Key, group: _Group | None, record: GroupRecord, *, changed: bool) -> _Group:
        """Write the record of a group; `group` is None for a new one."""
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
        """Schedule a check of the key for its next transition, unless an earlier one is scheduled."""
        if group.check_at <= due_at or self._stays(key):
            return
        group.check_at = due_at
        heapq.heappush(self._timers, (due_at, key))
        if self._timers[0][1] == key:
            self._wakeup.set()
