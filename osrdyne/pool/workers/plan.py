"""Plan the workers of one group, as a pure function of desired and observed state.

Each rule prevents a counterexample of the model (docs/design/lifecycle.md).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from osrdyne.drivers.base import Instance, InstanceId, InstanceState
from osrdyne.pool.state.groups.transitions import GroupStatus
from osrdyne.pool.state.observed import StartFailure
from osrdyne.pool.state.workers.instances import Draining

OVERDUE = "not ready within start_timeout"
REPLACED = "its settings have changed"
REFUSED = "the key is refused"
NOT_NEEDED = "fewer workers are needed"


@dataclass(frozen=True, slots=True)
class Start:
    slot: int


@dataclass(frozen=True, slots=True)
class Stop:
    instance_id: InstanceId
    why: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Forget an exited instance, after its end was recorded."""

    instance: Instance


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until `until` (monotonic; None: until a change). `for_room`: until another start is over."""

    why: str
    until: float | None = None
    for_room: bool = False


@dataclass(frozen=True, slots=True)
class Drain:
    """Ask a worker to take no more requests, finish those it runs, and end by itself."""

    instance_id: InstanceId
    why: str


@dataclass(frozen=True, slots=True)
class Update:
    """Give a group that the platform manages the present settings; the platform replaces the workers."""

    instance_id: InstanceId


GroupAction = Start | Stop | Drain | Update | Remove | Wait


@dataclass(frozen=True, slots=True)
class ObservedGroup:
    """The observed state of one group when the worker groups loop plans.

    `overdue`: instances that were not ready within the start time-out. `refused`: instances whose application refuses
    the key. `hanging`: instances that are alive and do not
    work, with the reason. `back_off_until`: no start before (monotonic). `failure`: the start failed permanently; a
    request triggers the next attempt. `room`: free places under `max_concurrent_starts`. `admitted`: the group has a
    place under `max_groups`. `is_ending`: the idle times of the group are over, and none of its workers has ended by
    itself.

    `paused`: a circuit pauses the group, and no worker is started. `probing`: except one, paused, for a probe.
    `readers`: the maximum number of workers at any moment (MaxConcurrentReaders); None: no limit.
    `serving`: instances that have been ready. `busy`: those that run requests. `outdated`: those started with other
    settings. `draining`: those that were asked to end. `drains`: whether they can be asked.
    """

    instances: Sequence[Instance]
    queue_exists: bool
    overdue: frozenset[InstanceId] = frozenset()
    refused: frozenset[InstanceId] = frozenset()
    hanging: Mapping[InstanceId, str] = field(default_factory=dict)
    back_off_until: float | None = None
    failure: StartFailure | None = None
    room: int = sys.maxsize
    admitted: bool = True
    is_ending: bool = False
    serving: frozenset[InstanceId] = frozenset()
    busy: frozenset[InstanceId] = frozenset()
    outdated: frozenset[InstanceId] = frozenset()
    draining: Mapping[InstanceId, Draining] = field(default_factory=dict)
    drains: bool = True
    readers: int | None = None
    paused: bool = False
    probing: bool = False


def plan_group(desired: GroupStatus | None, observed: ObservedGroup, *, slots: int, now: float) -> list[GroupAction]:
    """Return the next actions for one group's workers (lifecycle: resync, start-when-slot-is-free,
    unique-instance-names, stop-by-instance)."""
    exited = [instance for instance in observed.instances if instance.state is InstanceState.EXITED]
    running = [instance for instance in observed.instances if instance.state is InstanceState.RUNNING]
    # Before any start: an exited worker holds its slot and its name until it is removed.
    actions: list[GroupAction] = [Remove(instance) for instance in exited]
    # A planned group has no action in progress: these stops have failed, or an earlier leader began them.
    stuck = [instance for instance in observed.instances if instance.state is InstanceState.STOPPING]
    actions += [Stop(instance.instance_id, "its stop was not finished") for instance in stuck]
    # Also for keys without a queue: a worker that a deposed leader started late must end (lifecycle: resync).
    if desired is None:
        return actions + [Stop(instance.instance_id, "the group is not desired") for instance in running]
    stopped = {instance.instance_id: OVERDUE for instance in running if instance.instance_id in observed.overdue}
    stopped |= {
        instance.instance_id: why for instance in running if (why := observed.hanging.get(instance.instance_id))
    }
    # They end by themselves, but a platform that manages workers would start them again.
    stopped |= {instance.instance_id: REFUSED for instance in running if instance.instance_id in observed.refused}
    # Two workers of one slot: a platform without unique names, or a start by a deposed leader that came late.
    for instance in _surplus(running):
        stopped.setdefault(instance.instance_id, "surplus")
    actions += [Stop(instance_id, why) for instance_id, why in stopped.items()]
    kept = [instance for instance in running if instance.instance_id not in stopped]
    actions += _plan_draining(kept, observed, now=now)
    # No worker is started that would be stopped before it has loaded its data. With no slots, workers are drained.
    if not observed.queue_exists or (observed.is_ending and slots):
        return actions
    staying = [instance for instance in kept if instance.instance_id not in observed.draining]
    return actions + _plan_number(desired, staying, observed, slots=slots, now=now)


def _plan_draining(running: Sequence[Instance], observed: ObservedGroup, *, now: float) -> list[GroupAction]:
    """Ask draining workers again, because control messages may get lost, and stop those whose time is over."""
    actions: list[GroupAction] = []
    for instance in running:
        draining = observed.draining.get(instance.instance_id)
        if draining is not None and now >= draining.until:
            actions.append(Stop(instance.instance_id, draining.why))
        elif draining is not None and now >= draining.ask_again_at:
            actions.append(Drain(instance.instance_id, draining.why))
    return actions


def _plan_number(
    desired: GroupStatus, staying: Sequence[Instance], observed: ObservedGroup, *, slots: int, now: float
) -> list[GroupAction]:
    """Converge on the desired number of workers, all with the present settings.

    A worker with other settings is replaced while the group is in use: its successor starts first, in a spare slot, and
    when that is ready the old worker is drained; then the next. A platform that manages the workers of a group itself
    (Kubernetes) gets the new settings and does the same.
    """
    outdated = [instance for instance in staying if instance.instance_id in observed.outdated]
    current = [instance for instance in staying if instance.instance_id not in observed.outdated]
    settled = all(instance.instance_id in observed.serving for instance in current)
    # An idle group is not restarted for new settings: it ends by itself, and begins with them next time.
    replacing = bool(outdated) and desired is GroupStatus.ACTIVE
    excess = len(staying) - slots
    if excess > 0:
        # The successor is not ready yet: to end the old worker now would leave the group without one.
        if replacing and not settled:
            return []
        ends = sorted(staying, key=lambda instance: _stop_order(instance, observed))[:excess]
        return [_end(instance, observed) for instance in ends]
    if observed.paused:
        # One worker for a probe, which starts paused. Any other one would have nothing to do.
        alone = observed.probing and slots > 0 and not observed.instances
        return [_plan_start(observed, 0, 0, now=now)] if alone else []
    if replacing and not observed.drains:
        return [Update(instance.instance_id) for instance in outdated]
    # Hanging workers count, so that no successor works beside one; draining workers do not.
    places = sum(instance.instance_id not in observed.draining for instance in observed.instances)
    missing = 1 if excess == 0 and replacing and settled else max(0, slots - places)
    if observed.readers is not None:
        # Draining workers still hold requests. A successor has to wait for the end of one; it cannot start beside it.
        room = max(0, observed.readers - len(observed.instances))
        if excess == 0 and replacing and settled and not room and not observed.draining:
            return [_end(min(outdated, key=lambda instance: _stop_order(instance, observed)), observed)]
        missing = min(missing, room)
    # Stopping and exited ones hold their slot as well (lifecycle: start-when-slot-is-free).
    taken = {instance.slot for instance in observed.instances}
    free = (slot for slot in itertools.count() if slot not in taken)
    return [_plan_start(observed, slot, number, now=now) for number, slot in enumerate(itertools.islice(free, missing))]


def _stop_order(instance: Instance, observed: ObservedGroup) -> tuple[bool, bool, bool, int]:
    """Outdated workers first, then those that do not serve, then idle ones, then the latest."""
    instance_id = instance.instance_id
    return (
        instance_id not in observed.outdated,
        instance_id in observed.serving,
        instance_id in observed.busy,
        -instance.slot,
    )


def _end(instance: Instance, observed: ObservedGroup) -> GroupAction:
    why = REPLACED if instance.instance_id in observed.outdated else NOT_NEEDED
    return Drain(instance.instance_id, why) if observed.drains else Stop(instance.instance_id, why)


def _plan_start(observed: ObservedGroup, slot: int, number: int, *, now: float) -> GroupAction:
    if not observed.admitted:
        return Wait("max_groups groups are up")
    if observed.failure is not None:
        return Wait("the start failed; the next request after the back-off tries again")
    if observed.back_off_until is not None and now < observed.back_off_until:
        return Wait("the last worker ended; backing off", observed.back_off_until)
    if number >= observed.room:
        return Wait("max_concurrent_starts workers are starting", for_room=True)
    return Start(slot)


def _surplus(running: Sequence[Instance]) -> list[Instance]:
    """All but the oldest instance of each slot; names are unique (lifecycle: unique-instance-names), so there should
    be none."""
    oldest: dict[int, Instance] = {}
    for instance in sorted(running, key=lambda instance: (instance.started_at, instance.instance_id)):
        oldest.setdefault(instance.slot, instance)
    return [instance for instance in running if oldest[instance.slot] is not instance]
