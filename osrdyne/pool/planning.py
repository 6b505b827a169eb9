"""The decisions of the two loops, as pure functions: facts in, the next step out.

Each step prevents a counterexample of the model (LIFECYCLE); the numbers name the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from osrdyne.drivers.base import Instance, InstanceId, InstanceState
from osrdyne.pool.facts import Binding, QueueFacts, StartFailure, WorkerFacts
from osrdyne.pool.state import GroupStatus

OVERDUE = "not ready within start_timeout"

# --- request queues


class QueueStep(StrEnum):
    """What the actor of a key does next."""

    DECLARE = "declare"
    BIND = "bind"
    UNBIND = "unbind"
    DELETE = "delete"
    WAIT_FOR_STOP = "wait for stop"
    WAIT_FOR_SETTLE = "wait for settle"
    WAIT_FOR_WORKERS = "wait for workers"
    WAIT_FOR_TOTAL = "wait for total"
    KEEP = "keep"
    DONE = "done"


def plan_queue(
    wish: GroupStatus | None,
    queue: QueueFacts,
    workers: WorkerFacts,
    *,
    now: float,
    settle_delay: float,
    messages: int | None,
) -> QueueStep:
    """The next step for one request queue (LIFECYCLE 11, 18-20, 25, 28, 30).

    `messages`: the queue's total in a sample from after `delete_evidence_after`; None: not known yet.
    """
    if wish is GroupStatus.ACTIVE:
        return _plan_bound(queue, workers)
    if not queue.exists:
        return QueueStep.DONE
    if queue.binding is not Binding.UNBOUND or queue.unbound_at is None:
        return QueueStep.UNBIND  # always sent, whatever is believed (19)
    if wish is GroupStatus.UNBOUND:
        return QueueStep.DONE
    if now < queue.unbound_at + settle_delay:
        return QueueStep.WAIT_FOR_SETTLE
    if not workers.is_empty:
        return QueueStep.WAIT_FOR_WORKERS
    if messages is None:
        return QueueStep.WAIT_FOR_TOTAL
    return QueueStep.KEEP if messages else QueueStep.DELETE


def _plan_bound(queue: QueueFacts, workers: WorkerFacts) -> QueueStep:
    if not queue.exists:
        return QueueStep.DECLARE
    if queue.is_bound:
        return QueueStep.DONE
    # A stop in flight would hit a worker that has just got a request (18).
    return QueueStep.WAIT_FOR_STOP if workers.stopping else QueueStep.BIND


def stop_evidence_after(queue: QueueFacts, *, settle_delay: float) -> float | None:
    """Monotonic time after which a sample shows that an UNBOUND queue is empty: its workers may be stopped (21).

    None: nothing shows it yet, because its unbind has not been answered in this term.
    """
    if not queue.exists or queue.binding is not Binding.UNBOUND or queue.unbound_at is None:
        return None
    return queue.unbound_at + settle_delay


def delete_evidence_after(queue: QueueFacts, workers: WorkerFacts, *, settle_delay: float) -> float | None:
    """Monotonic time after which a sample shows that the queue may be deleted, or None: settled, no worker left (28).

    The probe alone does not see dead letters that wait for their confirm, nor delayed messages.
    """
    settled = stop_evidence_after(queue, settle_delay=settle_delay)
    if settled is None or workers.empty_since is None:
        return None
    return max(settled, workers.empty_since)


# --- worker groups


@dataclass(frozen=True, slots=True)
class Start:
    slot: int


@dataclass(frozen=True, slots=True)
class Stop:
    instance_id: InstanceId
    why: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Forget an exited instance, after its end was noted."""

    instance: Instance


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before `until` (monotonic; None: before something changes), or before there is room."""

    why: str
    until: float | None = None
    for_room: bool = False


GroupAction = Start | Stop | Remove | Wait


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What the worker groups loop knows of one group when it plans.

    `overdue`: instances that were not ready within the start time-out. `hanging`: those that are alive and do not work,
    and how that shows. `back_off_until`: no start before (monotonic). `failure`: the start failed for good; the next
    attempt comes on demand. `room`: a place under `max_concurrent_starts` is free. `admitted`: the group has a place
    under `max_groups`. `is_ending`: the idle group is being looked into, and none of its workers has ended by itself.
    """

    instances: Sequence[Instance]
    queue_exists: bool
    overdue: frozenset[InstanceId] = frozenset()
    hanging: Mapping[InstanceId, str] = field(default_factory=dict)
    back_off_until: float | None = None
    failure: StartFailure | None = None
    room: bool = True
    admitted: bool = True
    is_ending: bool = False


def plan_group(wish: GroupStatus | None, facts: GroupFacts, *, slots: int, now: float) -> list[GroupAction]:
    """The next steps for one group's workers (LIFECYCLE 10, 16, 17, 22)."""
    exited = [instance for instance in facts.instances if instance.state is InstanceState.EXITED]
    running = [instance for instance in facts.instances if instance.state is InstanceState.RUNNING]
    actions: list[GroupAction] = [Remove(instance) for instance in exited]
    # Nothing is under way for a group that is planned: whoever began to stop these, an earlier leader perhaps, is gone.
    stuck = [instance for instance in facts.instances if instance.state is InstanceState.STOPPING]
    actions += [Stop(instance.instance_id, "its stop was not finished") for instance in stuck]
    if wish is None:
        return actions + [Stop(instance.instance_id, "the group is not wanted") for instance in running]
    useless = {instance.instance_id: OVERDUE for instance in running if instance.instance_id in facts.overdue}
    useless |= {instance.instance_id: why for instance in running if (why := facts.hanging.get(instance.instance_id))}
    actions += [Stop(instance_id, why) for instance_id, why in useless.items()]
    actions += [
        Stop(instance.instance_id, "surplus") for instance in _surplus(running) if instance.instance_id not in useless
    ]
    if not facts.queue_exists or facts.is_ending:
        return actions  # a worker that would be stopped before it has loaded its data is not started
    taken = {instance.slot for instance in facts.instances}
    for slot in range(slots):
        if slot not in taken:
            actions.append(_plan_start(facts, slot, now=now))
    return actions


def _plan_start(facts: GroupFacts, slot: int, *, now: float) -> GroupAction:
    if not facts.admitted:
        return Wait("max_groups groups are up")
    if facts.failure is not None:
        return Wait("the start failed; the next request after the back-off tries again")
    if facts.back_off_until is not None and now < facts.back_off_until:
        return Wait("the last worker ended; backing off", facts.back_off_until)
    if not facts.room:
        return Wait("max_concurrent_starts workers are starting", for_room=True)
    return Start(slot)


def _surplus(running: Sequence[Instance]) -> list[Instance]:
    """All but the oldest instance of each slot: names are unique (17), so there should be none."""
    oldest: dict[int, Instance] = {}
    for instance in sorted(running, key=lambda instance: (instance.started_at, instance.instance_id)):
        oldest.setdefault(instance.slot, instance)
    return [instance for instance in running if oldest[instance.slot] is not instance]
