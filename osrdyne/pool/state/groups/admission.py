"""Admission: which groups may have workers, and which wait for a place. No I/O.

At most `max_groups` groups have a place. The queue of a further group is bound, and its requests stay in the queue
until a place is free; groups get places by the priority of their requests, then in the order of their arrival. Requests
for new keys are refused beyond `max_waiting` waiting groups and beyond `max_keys` distinct keys: random keys must not
exhaust the host or RabbitMQ, where every name of a quorum queue takes an Erlang atom until the node restarts (broker:
atoms-per-queue-name). Written by the forwarder and the worker groups loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from osrdyne.pool.state.groups.transitions import GroupRecord, GroupStatus
from osrdyne.protocol.names import Key

NEARLY_ALL = 0.8  # Share of `max_keys` at which the operator is warned.


class Verdict(StrEnum):
    ADMITTED = "admitted"
    WAITING = "waiting"
    NO_ROOM = "no room to wait"
    TOO_MANY_KEYS = "too many keys"

    @property
    def is_refusal(self) -> bool:
        return self in {Verdict.NO_ROOM, Verdict.TOO_MANY_KEYS}


class KeyCounter:
    """Counts the distinct keys for which this daemon has declared queues. It outlives terms, as the atoms in
    RabbitMQ do."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._seen: set[int] = set()
        self._warned = False

    def __len__(self) -> int:
        return len(self._seen)

    def take_warning(self) -> bool:
        """Return True once, when nearly all keys are used up."""
        due = not self._warned and len(self._seen) >= self._max_keys * NEARLY_ALL
        self._warned |= due
        return due

    def has_room_for(self, key: Key) -> bool:
        return len(self._seen) < self._max_keys or hash(key) in self._seen

    def count(self, key: Key) -> None:
        self._seen.add(hash(key))


class Admission:
    """The groups with a place and the groups that wait for one, in one term."""

    def __init__(
        self,
        *,
        max_groups: float | Callable[[], float],
        max_waiting: int,
        key_counter: KeyCounter,
        rank: Callable[[Key], int] = lambda _: 0,
    ) -> None:
        """`max_groups`: a number, or a function that returns the present one."""
        self._max_groups: Callable[[], float] = max_groups if callable(max_groups) else lambda: max_groups
        self._rank = rank
        self._max_waiting = max_waiting
        self.key_counter = key_counter
        self.on_waiting: Callable[[], None] = lambda: None  # Called when a group begins to wait.
        self._admitted: set[Key] = set()
        self._waiting: dict[Key, None] = {}

    def waiting(self) -> list[Key]:
        """The groups that wait for a place: by the priority of their requests, then in the order of their arrival."""
        return sorted(self._waiting, key=self._rank)

    def admitted(self) -> list[Key]:
        """The groups that have a place."""
        return list(self._admitted)

    def is_admitted(self, key: Key) -> bool:
        return key in self._admitted

    def is_waiting(self, key: Key) -> bool:
        return key in self._waiting

    def request(self, key: Key) -> Verdict:
        """Request a place for a key. A refusal changes nothing."""
        if key in self._admitted:
            return Verdict.ADMITTED
        if key in self._waiting:
            return Verdict.WAITING
        if not self.key_counter.has_room_for(key):
            return Verdict.TOO_MANY_KEYS
        if self._has_room() and not self._waiting:  # a new group does not overtake waiting ones
            return self.admit(key)
        if len(self._waiting) >= self._max_waiting:
            return Verdict.NO_ROOM
        return self._enqueue(key)

    def expect(self, key: Key) -> Verdict:
        """Reserve a place for a group that is desired already, because it was adopted or started by an operator. It
        may have to wait, but is not refused."""
        verdict = self.request(key)
        return self._enqueue(key) if verdict.is_refusal else verdict

    def admit(self, key: Key) -> Verdict:
        """Give a place at once, also beyond the limit: the group runs already, or is pinned."""
        self._waiting.pop(key, None)
        self._admitted.add(key)
        self.key_counter.count(key)
        return Verdict.ADMITTED

    def release(self, key: Key) -> list[Key]:
        """Free the place of a group that has ended. Returns the groups that get a place, in their order."""
        self._admitted.discard(key)
        self._waiting.pop(key, None)
        return self.promote()

    def promote(self) -> list[Key]:
        """Give the free places to waiting groups; call it when the limit may have been raised. Returns the groups in
        their order."""
        promoted = []
        while self._waiting and self._has_room():
            # The first one of the highest priority, as in `waiting`.
            following = min(self._waiting, key=self._rank)
            self.admit(following)
            promoted.append(following)
        return promoted

    def _has_room(self) -> bool:
        return len(self._admitted) < self._max_groups()

    def _enqueue(self, key: Key) -> Verdict:
        self._waiting[key] = None
        self.key_counter.count(key)
        self.on_waiting()
        return Verdict.WAITING


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group with a place, as a candidate for eviction. `busy`: one of its workers has work or is loading. `rank`: the
    candidates of the lowest rank are chosen first."""

    key: Key
    record: GroupRecord
    busy: bool
    stays: bool
    rank: int = 0


def choose_to_end(candidates: Iterable[Candidate], *, waiting: int, now: float, idle_for: float) -> list[Key]:
    """Choose the idle groups to end, so that the waiting groups get a place: by rank, the least recently used first.

    Groups that are ending already count as free places, unless they have work to finish. A group that was used within
    `idle_for` seconds, has work, is pinned or held, is not chosen.
    """
    found = list(candidates)
    ending = sum(
        1 for one in found if one.record.status is GroupStatus.UNBOUND and one.record.stop_at <= now and not one.busy
    )
    idle = [
        one
        for one in found
        if not (one.busy or one.stays)
        and now - one.record.last_activity >= idle_for
        and not (one.record.status is GroupStatus.UNBOUND and one.record.stop_at <= now)
    ]
    idle.sort(key=lambda one: (one.rank, one.record.last_activity, one.key))
    return [one.key for one in idle[: max(0, waiting - ending)]]
