"""The tracker in virtual time, and against a naive model that checks every group at every moment.

The model proves what holds, pins, adoption, retirement and the end of a group do (lifecycle: pin-until-forwarded).
"""

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from osrdyne.pool.state.groups.tracker import PoolStateTracker
from osrdyne.pool.state.groups.transitions import Delays, GroupStatus
from osrdyne.protocol.names import Key
from osrdyne.testing.clock import VirtualClock

A, B, LONG = Key("a"), Key("b"), Key("long")
DELAYS = Delays(unbind=100.0, stop=50.0)


@pytest.fixture
def clock():
    return VirtualClock(monotonic=0.0)


@pytest.fixture
def tracker(clock):
    return PoolStateTracker(term=3, delays=DELAYS, clock=clock)


async def pass_time(clock: VirtualClock, tracker: PoolStateTracker, seconds: float) -> None:
    await clock.advance(seconds)
    tracker.advance()


class TestTracker:
    async def test_idle_group_that_is_not_held_is_unbound_and_then_due_to_stop(self, clock, tracker):
        """Also while the timer of a longer wait runs."""
        running = asyncio.create_task(tracker.run())
        tracker.require_worker_group(LONG, 500.0)
        await clock.advance(1.0)
        for key in (A, B):
            tracker.require_worker_group(key)
        tracker.hold(B)
        await clock.advance(99.0)
        assert tracker.status(A) is GroupStatus.ACTIVE
        await clock.advance(1.0)
        assert (tracker.status(A), tracker.stop_due_keys()) == (GroupStatus.UNBOUND, set())
        await clock.advance(50.0)
        assert (tracker.stop_due_keys(), await tracker.stop_due.wait(0)) == ({A}, True)
        assert tracker.status(B) is tracker.status(LONG) is GroupStatus.ACTIVE
        running.cancel()

    async def test_steady_use_keeps_one_timer_for_each_key(self, clock, tracker):
        keys = [Key(str(number)) for number in range(10_000)]
        for _ in range(3):
            for key in keys:
                tracker.require_worker_group(key)
            await clock.advance(10.0)
        assert len(tracker._timers) == len(keys)

    async def test_generation_grows_with_every_change_and_with_a_new_group_of_the_key(self, clock, tracker):
        """lifecycle: generations."""
        first = tracker.require_worker_group(A)
        assert tracker.require_worker_group(A) == first
        await pass_time(clock, tracker, 100.0)
        unbound = tracker.generation_of(A)
        again = tracker.require_worker_group(A)
        assert first < unbound < again == tracker.generation
        tracker.retire(A)
        await pass_time(clock, tracker, 0.0)
        assert tracker.end(A)
        assert tracker.require_worker_group(A) > again
        assert PoolStateTracker(term=4, delays=DELAYS, clock=clock).generation > tracker.generation

    async def test_subscriber_begins_with_all_groups_and_is_notified_of_changes_only(self, clock, tracker):
        tracker.require_worker_group(A)
        changes = tracker.subscribe()
        assert changes.take() == [A]
        tracker.require_worker_group(A)
        tracker.require_worker_group(B)
        assert changes.take() == [B]
        await pass_time(clock, tracker, 100.0)
        assert sorted(changes.take()) == [A, B]


@dataclass
class Naive:
    """A group as the specification words it."""

    status: GroupStatus
    until: float
    due: bool = False


class TrackerMachine(RuleBasedStateMachine):
    """Any order of events and times leads to the state that looking at every group every second gives."""

    keys = st.sampled_from([A, B, Key("é"), Key("")])

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock(monotonic=0.0)
        self.tracker = PoolStateTracker(term=1, delays=DELAYS, clock=self.clock)
        self.groups: dict[Key, Naive] = {}
        self.held: list[Key] = []
        self.pinned: set[Key] = set()
        self.seen: dict[Key, object] = {}

    def model_require(self, key: Key, extra: float = 0.0) -> None:
        until = self.clock.monotonic() + DELAYS.unbind + extra
        group = self.groups.get(key)
        if group is not None and group.status is GroupStatus.ACTIVE:
            until = max(until, group.until)
        self.groups[key] = Naive(GroupStatus.ACTIVE, until)

    def stays(self, key: Key) -> bool:
        return key in self.held or key in self.pinned

    @rule(key=keys, extra=st.sampled_from([0.0, 1.0, 300.0]))
    def require(self, key: Key, extra: float) -> None:
        generation = self.tracker.require_worker_group(key, extra)
        self.model_require(key, extra)
        assert self.seen.get(key, generation) <= generation  # type: ignore[operator]
        self.seen[key] = generation

    @rule(key=keys)
    def hold(self, key: Key) -> None:
        self.tracker.hold(key)
        self.held.append(key)
        self.tracker.require_worker_group(key)
        self.model_require(key)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.held))
        self.tracker.release(key)
        self.held.remove(key)

    @rule(key=keys)
    def pin(self, key: Key) -> None:
        self.tracker.pin(key)
        self.pinned.add(key)
        self.model_require(key)

    @rule(key=keys)
    def unpin(self, key: Key) -> None:
        self.tracker.unpin(key)
        if key in self.pinned:
            self.pinned.discard(key)
            self.model_require(key)

    @rule(key=keys, status=st.sampled_from((GroupStatus.ACTIVE, GroupStatus.UNBOUND)))
    def adopt(self, key: Key, status: GroupStatus) -> None:
        self.tracker.adopt(key, status)
        if key not in self.groups:
            delay = DELAYS.unbind if status is GroupStatus.ACTIVE else DELAYS.stop
            self.groups[key] = Naive(status, self.clock.monotonic() + delay)

    @rule(key=keys)
    def retire(self, key: Key) -> None:
        retired = self.tracker.retire(key)
        assert retired is (key in self.groups and not self.stays(key))
        if retired:
            self.groups[key] = Naive(GroupStatus.UNBOUND, self.clock.monotonic())

    @rule(key=keys)
    def end(self, key: Key) -> None:
        group = self.groups.get(key)
        ended = self.tracker.end(key)
        assert ended is (group is not None and group.due and not self.stays(key))
        if ended:
            del self.groups[key]

    @rule(seconds=st.sampled_from([0.0, 1.0, 49.0, 50.0, 100.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock._now += seconds
        self.tracker.advance()
        for key, group in self.groups.items():
            if self.stays(key) or group.until > self.clock.monotonic() or group.due:
                continue
            if group.status is GroupStatus.ACTIVE:
                self.groups[key] = Naive(GroupStatus.UNBOUND, self.clock.monotonic() + DELAYS.stop)
            else:
                group.due = True

    @invariant()
    def statuses_agree(self) -> None:
        keys = self.tracker.keys()
        statuses = {key: self.tracker.status(key) for key in keys}
        assert statuses == {key: group.status for key, group in self.groups.items()}
        assert self.tracker.stop_due_keys() == {key for key, group in self.groups.items() if group.due}
        assert all(self.tracker.is_held(key) for key in self.held)


TestTrackerAgainstModel = TrackerMachine.TestCase
TestTrackerAgainstModel.settings = settings(stateful_step_count=40)
