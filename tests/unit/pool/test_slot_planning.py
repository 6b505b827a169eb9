"""How many workers a group has and with which settings: the pure decision."""

from __future__ import annotations

import pytest

from osrdyne.drivers.base import Instance, InstanceId, InstanceState
from osrdyne.pool.state.groups.transitions import GroupStatus
from osrdyne.pool.state.workers.instances import Draining
from osrdyne.pool.workers.plan import (
    NOT_NEEDED,
    REPLACED,
    Drain,
    ObservedGroup,
    Remove,
    Start,
    Stop,
    Update,
    Wait,
    plan_group,
)
from osrdyne.protocol.names import Key, WorkerId

ACTIVE, UNBOUND = GroupStatus.ACTIVE, GroupStatus.UNBOUND
NOW = 1000.0


def instance(slot: int, *, state: InstanceState = InstanceState.RUNNING) -> Instance:
    name = f"i{slot}"
    return Instance(InstanceId(name), Key("a"), slot, WorkerId(name), state, "spec", float(slot), name)


def ids(*slots: int) -> frozenset[InstanceId]:
    return frozenset(InstanceId(f"i{slot}") for slot in slots)


def observed(*instances: Instance, **more: object) -> ObservedGroup:
    return ObservedGroup(instances, True, **more)  # type: ignore[arg-type]


def replace(slot: int) -> Drain:
    return Drain(InstanceId(f"i{slot}"), REPLACED)


def spare(slot: int) -> Drain:
    return Drain(InstanceId(f"i{slot}"), NOT_NEEDED)


LEAVING = {InstanceId("i1"): Draining(NOT_NEEDED, until=NOW + 100, ask_again_at=NOW + 5)}

ROWS = {
    "every free slot gets a worker": (observed(instance(1)), 3, [Start(0), Start(2)]),
    "a driver that starts nothing has no slots and misses no worker": (observed(), 0, []),
    "paused by a circuit: no worker": (observed(paused=True), 1, []),
    "paused, and one is missing": (observed(instance(0), serving=ids(0), paused=True), 2, []),
    "paused, and outdated: nothing replaces it": (
        observed(instance(0), serving=ids(0), outdated=ids(0), paused=True), 1, []
    ),
    "paused, and needed for a probe": (observed(paused=True, probing=True), 3, [Start(0)]),
    "paused, and there is one for the probe": (observed(instance(1), paused=True, probing=True), 3, []),
    "paused, and its queue is being removed": (observed(paused=True, probing=True), 0, []),
    "outdated: its successor comes first, in a spare slot": (
        observed(instance(0), serving=ids(0), outdated=ids(0)), 1, [Start(1)]
    ),
    "successor is loading: the old one goes on": (
        observed(instance(0), instance(1), serving=ids(0), outdated=ids(0)), 1, []
    ),
    "successor is ready: the old one may finish and end": (
        observed(instance(0), instance(1), serving=ids(0, 1), outdated=ids(0)), 1, [replace(0)]
    ),
    "old one is finishing: nothing": (
        observed(instance(0), instance(1), serving=ids(0, 1), outdated=ids(1), draining=LEAVING), 1, []
    ),
    "several outdated: one at a time": (
        observed(instance(0), instance(1), serving=ids(0, 1), outdated=ids(0, 1)), 2, [Start(2)]
    ),
    "one of several is replaced: the idle one goes before the busy one": (
        observed(*map(instance, range(3)), serving=ids(0, 1, 2), outdated=ids(0, 1), busy=ids(1)), 2, [replace(0)]
    ),
    "too few, outdated: only what is missing": (
        observed(instance(0), serving=ids(0), outdated=ids(0)), 2, [Start(1)]
    ),
    "successor failed for good: the old one goes on": (
        observed(instance(0), serving=ids(0), outdated=ids(0), back_off_until=NOW + 9), 1,
        [Wait("the last worker ended; backing off", NOW + 9)],
    ),
    "too many: idle ones go, the latest first": (
        observed(*map(instance, range(3)), serving=ids(0, 1, 2), busy=ids(2)), 2, [spare(1)]
    ),
    "too many: one that loads goes before one that serves": (
        observed(instance(0), instance(1), serving=ids(1)), 1, [spare(0)]
    ),
    "one is leaving and needed again: another slot": (
        observed(instance(0), instance(1), serving=ids(0, 1), draining=LEAVING), 2, [Start(2)]
    ),
    "who is ending keeps its place": (
        observed(instance(0, state=InstanceState.EXITED)), 1, [Remove(instance(0, state=InstanceState.EXITED))]
    ),
    "no more starts than there is room": (
        observed(room=1), 2, [Start(0), Wait("max_concurrent_starts workers are starting", for_room=True)]
    ),
    "outdated and at the limit of readers: the old one ends first": (
        observed(instance(0), serving=ids(0), outdated=ids(0), readers=1), 1, [replace(0)]
    ),
    "at the limit of readers: the successor waits for the end of the old one": (
        observed(instance(0), instance(1), serving=ids(0, 1), outdated=ids(1), draining=LEAVING, readers=2), 2, []
    ),
    "below the limit of readers: the successor comes first": (
        observed(instance(0), serving=ids(0), outdated=ids(0), readers=2), 1, [Start(1)]
    ),
    "one is leaving at the limit of readers: no worker starts beside it": (
        observed(instance(0), instance(1), serving=ids(0, 1), draining=LEAVING, readers=2), 2, []
    ),
    "a platform that counts workers itself is asked to stop": (
        observed(instance(0), instance(1), serving=ids(0, 1), outdated=ids(0), drains=False), 1,
        [Stop(InstanceId("i0"), REPLACED)],
    ),
    "a platform that replaces workers itself is given the new settings": (
        observed(instance(0), serving=ids(0), outdated=ids(0), drains=False), 1, [Update(InstanceId("i0"))]
    ),
    "one that is not ready yet is given them too": (
        observed(instance(0), outdated=ids(0), drains=False), 1, [Update(InstanceId("i0"))]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("known", "slots", "actions"), ROWS.values(), ids=ROWS.keys())
def test_active_group(known: ObservedGroup, slots: int, actions: list[object]) -> None:
    assert plan_group(ACTIVE, known, slots=slots, now=NOW) == actions


def test_unused_group_is_not_replaced() -> None:
    known = observed(instance(0), serving=ids(0), outdated=ids(0))
    assert plan_group(UNBOUND, known, slots=1, now=NOW) == []


def test_worker_that_may_end_is_asked_again_and_then_stopped() -> None:
    known = observed(instance(0), instance(1), serving=ids(0, 1), draining=LEAVING)
    assert plan_group(ACTIVE, known, slots=1, now=NOW + 5) == [spare(1)]
    assert plan_group(ACTIVE, known, slots=1, now=NOW + 100) == [Stop(InstanceId("i1"), NOT_NEEDED)]


def test_idle_group_without_a_slot_is_drained() -> None:
    """The queue of its key is being removed: its workers finish what they run, and take no more."""
    known = observed(instance(0), serving=ids(0), busy=ids(0), is_ending=True)
    assert plan_group(UNBOUND, known, slots=0, now=NOW) == [spare(0)]
