"""The tables behind the two loops: the observed state in, the next step out.

Rows name the step of docs/design/lifecycle.md for which they stand.
"""

import pytest

from osrdyne.drivers.base import Exit, Instance, InstanceId, InstanceState
from osrdyne.pool.queues.plan import QueueStep, delete_evidence_after, plan_queue, stop_evidence_after
from osrdyne.pool.state.groups.transitions import GroupStatus
from osrdyne.pool.state.observed import Binding, ObservedQueue, ObservedWorkers, StartFailure
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

ACTIVE, UNBOUND, ABSENT = GroupStatus.ACTIVE, GroupStatus.UNBOUND, None
SETTLE = 10.0
NOW = 100.0

NO_QUEUE = ObservedQueue()
LISTED = ObservedQueue(exists=True)
BOUND = ObservedQueue(exists=True, binding=Binding.BOUND)
UNBOUND_NOW = ObservedQueue(exists=True, binding=Binding.UNBOUND, unbound_at=NOW)
SETTLED = ObservedQueue(exists=True, binding=Binding.UNBOUND, unbound_at=NOW - SETTLE)


def instance(number: int = 1, *, state: InstanceState = InstanceState.RUNNING, slot: int = 0) -> Instance:
    return Instance(
        instance_id=InstanceId(f"i{number}"),
        key=Key("a"),
        slot=slot,
        worker_id=WorkerId(f"w{number}"),
        state=state,
        spec_hash="s",
        started_at=float(number),
        external_id=str(number),
        exit=Exit(code=1) if state is InstanceState.EXITED else None,
    )


NO_WORKER = ObservedWorkers(empty_since=NOW - 50)
RUNNING = ObservedWorkers(instances=(instance(),))
STOP_DECIDED = ObservedWorkers(instances=(instance(),), stopping=True)
STARTING = ObservedWorkers(starting=True)

QUEUE_ROWS = {
    "wanted, no queue: declare": (ACTIVE, NO_QUEUE, NO_WORKER, QueueStep.DECLARE),
    "wanted, queue listed, binding not believed (9): bind": (ACTIVE, LISTED, NO_WORKER, QueueStep.BIND),
    "wanted and bound: nothing": (ACTIVE, BOUND, RUNNING, QueueStep.DONE),
    "wanted again after unbind: bind": (ACTIVE, SETTLED, RUNNING, QueueStep.BIND),
    "wanted again while a stop is under way (18): wait": (ACTIVE, SETTLED, STOP_DECIDED, QueueStep.WAIT_FOR_STOP),
    "wanted and bound while a surplus stops: nothing": (ACTIVE, BOUND, STOP_DECIDED, QueueStep.DONE),
    "wanted, no queue, stop under way: the queue may come": (ACTIVE, NO_QUEUE, STOP_DECIDED, QueueStep.DECLARE),
    "idle and bound (19): unbind": (UNBOUND, BOUND, RUNNING, QueueStep.UNBIND),
    "idle, binding unknown (19): unbind, whatever is believed": (UNBOUND, LISTED, NO_WORKER, QueueStep.UNBIND),
    "idle and unbound: nothing": (UNBOUND, SETTLED, RUNNING, QueueStep.DONE),
    "idle without queue: nothing": (UNBOUND, NO_QUEUE, NO_WORKER, QueueStep.DONE),
    "unwanted, no queue: nothing": (ABSENT, NO_QUEUE, RUNNING, QueueStep.DONE),
    "unwanted, binding unknown (25, 9): unbind first": (ABSENT, LISTED, NO_WORKER, QueueStep.UNBIND),
    "unwanted and bound (25): unbind first": (ABSENT, BOUND, NO_WORKER, QueueStep.UNBIND),
    "unwanted, not settled (20): wait": (ABSENT, UNBOUND_NOW, NO_WORKER, QueueStep.WAIT_FOR_SETTLE),
    "unwanted, workers left (25): wait": (ABSENT, SETTLED, RUNNING, QueueStep.WAIT_FOR_WORKERS),
    "unwanted, a start under way (25): wait": (ABSENT, SETTLED, STARTING, QueueStep.WAIT_FOR_WORKERS),
    "unwanted, a stop under way (25): wait": (ABSENT, SETTLED, STOP_DECIDED, QueueStep.WAIT_FOR_WORKERS),
    "unwanted, unbound, settled, no worker (25): delete": (ABSENT, SETTLED, NO_WORKER, QueueStep.DELETE),
}


@pytest.mark.parametrize(("desired", "queue", "workers", "step"), QUEUE_ROWS.values(), ids=QUEUE_ROWS.keys())
def test_queue_plan(desired, queue, workers, step):
    assert plan_queue(desired, queue, workers, now=NOW, settle_delay=SETTLE, messages=0) is step


@pytest.mark.parametrize(
    ("waited", "messages", "step"),
    [
        (SETTLE - 0.1, 0, QueueStep.WAIT_FOR_SETTLE),
        (SETTLE, None, QueueStep.WAIT_FOR_TOTAL),
        (SETTLE, 0, QueueStep.DELETE),
        (SETTLE, 1, QueueStep.KEEP),
    ],
)
def test_queue_is_deleted_once_it_is_settled_with_a_total_of_zero(waited, messages, step):
    """lifecycle: total-for-hidden-messages."""
    found = plan_queue(ABSENT, UNBOUND_NOW, NO_WORKER, now=NOW + waited, settle_delay=SETTLE, messages=messages)
    assert found is step


@pytest.mark.parametrize(
    ("empty_since", "after"), [(NOW - 50, NOW), (NOW + 7, NOW + 7), (None, None)], ids=["before", "after", "unknown"]
)
def test_evidence_for_the_deletion_is_sampled_after_the_last_worker(empty_since, after):
    """lifecycle: total-for-hidden-messages; for a stop, after settling: idle-needs-a-fresh-total."""
    workers = ObservedWorkers(empty_since=empty_since)
    assert delete_evidence_after(SETTLED, workers, settle_delay=SETTLE) == after
    assert stop_evidence_after(UNBOUND_NOW, settle_delay=SETTLE) == NOW + SETTLE


@pytest.mark.parametrize("queue", [NO_QUEUE, LISTED, BOUND], ids=["no queue", "binding unknown", "bound"])
def test_no_evidence_without_unbind_ok_of_this_term(queue):
    assert stop_evidence_after(queue, settle_delay=SETTLE) is None
    assert delete_evidence_after(queue, NO_WORKER, settle_delay=SETTLE) is None


RUNS, ENDS, GONE = instance(1), instance(2, state=InstanceState.STOPPING), instance(3, state=InstanceState.EXITED)
FAILED = StartFailure("no such module", (), 2, retry_at=NOW)
UNWANTED = Stop(RUNS.instance_id, "the group is not desired")
UNFINISHED = Stop(ENDS.instance_id, "its stop was not finished")

GROUP_ROWS = {
    "wanted, nothing runs (16): start": (ACTIVE, ObservedGroup([], True), [Start(0)]),
    "idle but not over, nothing runs (16): start": (UNBOUND, ObservedGroup([], True), [Start(0)]),
    "wanted without queue: start only once it exists": (ACTIVE, ObservedGroup([], False), []),
    "wanted and running: nothing": (ACTIVE, ObservedGroup([RUNS], True), []),
    "wanted, an earlier leader's stop hangs (16, 22): finish it": (ACTIVE, ObservedGroup([ENDS], True), [UNFINISHED]),
    "wanted, the worker ended: its slot is freed first": (ACTIVE, ObservedGroup([GONE], True), [Remove(GONE)]),
    "wanted, two in one slot (10, 17): the younger is surplus": (
        ACTIVE,
        ObservedGroup([instance(5), RUNS], True),
        [Stop(InstanceId("i5"), "surplus")],
    ),
    "wanted, not ready in time: stop": (
        ACTIVE,
        ObservedGroup([RUNS], True, overdue=frozenset({RUNS.instance_id})),
        [Stop(RUNS.instance_id, "not ready within start_timeout")],
    ),
    "wanted, alive without working: stop": (
        ACTIVE,
        ObservedGroup([RUNS], True, hanging={RUNS.instance_id: "it does not answer"}),
        [Stop(RUNS.instance_id, "it does not answer")],
    ),
    "its end is being looked into: no worker is started for it": (UNBOUND, ObservedGroup([], True, is_ending=True), []),
    "wanted, backing off: wait until then": (
        ACTIVE,
        ObservedGroup([], True, back_off_until=NOW + 5),
        [Wait("the last worker ended; backing off", NOW + 5)],
    ),
    "wanted, back-off over: start": (ACTIVE, ObservedGroup([], True, back_off_until=NOW), [Start(0)]),
    "wanted, failed for good: wait for a request": (
        ACTIVE,
        ObservedGroup([], True, failure=FAILED),
        [Wait("the start failed; the next request after the back-off tries again")],
    ),
    "wanted, no room: wait for it": (
        ACTIVE,
        ObservedGroup([], True, room=False),
        [Wait("max_concurrent_starts workers are starting", for_room=True)],
    ),
    "unwanted and running (10): stop": (ABSENT, ObservedGroup([RUNS], True), [UNWANTED]),
    "unwanted, its queue is unknown (10): stop": (ABSENT, ObservedGroup([RUNS], False), [UNWANTED]),
    "unwanted, an earlier leader's stop hangs: finish it": (ABSENT, ObservedGroup([ENDS], True), [UNFINISHED]),
    "unwanted and ended: forget": (ABSENT, ObservedGroup([GONE], True), [Remove(GONE)]),
    "unwanted, nothing runs: nothing": (ABSENT, ObservedGroup([], True), []),
}


@pytest.mark.parametrize(("desired", "observed", "actions"), GROUP_ROWS.values(), ids=GROUP_ROWS.keys())
def test_group_plan(desired, observed, actions):
    assert plan_group(desired, observed, slots=1, now=NOW) == actions


def in_slot(slot: int, *, state: InstanceState = InstanceState.RUNNING) -> Instance:
    return instance(slot, state=state, slot=slot)


def ids(*slots: int) -> frozenset[InstanceId]:
    return frozenset(InstanceId(f"i{slot}") for slot in slots)


def observed(*instances: Instance, **more: object) -> ObservedGroup:
    return ObservedGroup(instances, True, **more)  # type: ignore[arg-type]


def replace(slot: int) -> Drain:
    return Drain(InstanceId(f"i{slot}"), REPLACED)


def spare(slot: int) -> Drain:
    return Drain(InstanceId(f"i{slot}"), NOT_NEEDED)


LEAVING = {InstanceId("i1"): Draining(NOT_NEEDED, until=NOW + 100, ask_again_at=NOW + 5)}

SLOT_ROWS = {
    "every free slot gets a worker": (observed(in_slot(1)), 3, [Start(0), Start(2)]),
    "a driver that starts nothing has no slots and misses no worker": (observed(), 0, []),
    "paused by a circuit: no worker": (observed(paused=True), 1, []),
    "paused, and one is missing": (observed(in_slot(0), serving=ids(0), paused=True), 2, []),
    "paused, and outdated: nothing replaces it": (
        observed(in_slot(0), serving=ids(0), outdated=ids(0), paused=True), 1, []
    ),
    "paused, and needed for a probe": (observed(paused=True, probing=True), 3, [Start(0)]),
    "paused, and there is one for the probe": (observed(in_slot(1), paused=True, probing=True), 3, []),
    "paused, and its queue is being removed": (observed(paused=True, probing=True), 0, []),
    "outdated: its successor comes first, in a spare slot": (
        observed(in_slot(0), serving=ids(0), outdated=ids(0)), 1, [Start(1)]
    ),
    "successor is loading: the old one goes on": (
        observed(in_slot(0), in_slot(1), serving=ids(0), outdated=ids(0)), 1, []
    ),
    "successor is ready: the old one may finish and end": (
        observed(in_slot(0), in_slot(1), serving=ids(0, 1), outdated=ids(0)), 1, [replace(0)]
    ),
    "old one is finishing: nothing": (
        observed(in_slot(0), in_slot(1), serving=ids(0, 1), outdated=ids(1), draining=LEAVING), 1, []
    ),
    "several outdated: one at a time": (
        observed(in_slot(0), in_slot(1), serving=ids(0, 1), outdated=ids(0, 1)), 2, [Start(2)]
    ),
    "one of several is replaced: the idle one goes before the busy one": (
        observed(*map(in_slot, range(3)), serving=ids(0, 1, 2), outdated=ids(0, 1), busy=ids(1)), 2, [replace(0)]
    ),
    "too few, outdated: only what is missing": (
        observed(in_slot(0), serving=ids(0), outdated=ids(0)), 2, [Start(1)]
    ),
    "successor failed for good: the old one goes on": (
        observed(in_slot(0), serving=ids(0), outdated=ids(0), back_off_until=NOW + 9), 1,
        [Wait("the last worker ended; backing off", NOW + 9)],
    ),
    "too many: idle ones go, the latest first": (
        observed(*map(in_slot, range(3)), serving=ids(0, 1, 2), busy=ids(2)), 2, [spare(1)]
    ),
    "too many: one that loads goes before one that serves": (
        observed(in_slot(0), in_slot(1), serving=ids(1)), 1, [spare(0)]
    ),
    "one is leaving and needed again: another slot": (
        observed(in_slot(0), in_slot(1), serving=ids(0, 1), draining=LEAVING), 2, [Start(2)]
    ),
    "who is ending keeps its place": (
        observed(in_slot(0, state=InstanceState.EXITED)), 1, [Remove(in_slot(0, state=InstanceState.EXITED))]
    ),
    "no more starts than there is room": (
        observed(room=1), 2, [Start(0), Wait("max_concurrent_starts workers are starting", for_room=True)]
    ),
    "outdated and at the limit of readers: the old one ends first": (
        observed(in_slot(0), serving=ids(0), outdated=ids(0), readers=1), 1, [replace(0)]
    ),
    "at the limit of readers: the successor waits for the end of the old one": (
        observed(in_slot(0), in_slot(1), serving=ids(0, 1), outdated=ids(1), draining=LEAVING, readers=2), 2, []
    ),
    "below the limit of readers: the successor comes first": (
        observed(in_slot(0), serving=ids(0), outdated=ids(0), readers=2), 1, [Start(1)]
    ),
    "one is leaving at the limit of readers: no worker starts beside it": (
        observed(in_slot(0), in_slot(1), serving=ids(0, 1), draining=LEAVING, readers=2), 2, []
    ),
    "a platform that counts workers itself is asked to stop": (
        observed(in_slot(0), in_slot(1), serving=ids(0, 1), outdated=ids(0), drains=False), 1,
        [Stop(InstanceId("i0"), REPLACED)],
    ),
    "a platform that replaces workers itself is given the new settings": (
        observed(in_slot(0), serving=ids(0), outdated=ids(0), drains=False), 1, [Update(InstanceId("i0"))]
    ),
    "one that is not ready yet is given them too": (
        observed(in_slot(0), outdated=ids(0), drains=False), 1, [Update(InstanceId("i0"))]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("known", "slots", "actions"), SLOT_ROWS.values(), ids=SLOT_ROWS.keys())
def test_active_group(known, slots, actions):
    assert plan_group(ACTIVE, known, slots=slots, now=NOW) == actions


def test_unused_group_is_not_replaced_and_without_a_slot_drained():
    """The queue of its key is being removed: its workers finish what they run, and take no more."""
    outdated = observed(in_slot(0), serving=ids(0), outdated=ids(0))
    ending = observed(in_slot(0), serving=ids(0), busy=ids(0), is_ending=True)
    plans = [plan_group(UNBOUND, known, slots=slots, now=NOW) for known, slots in ((outdated, 1), (ending, 0))]
    assert plans == [[], [spare(0)]]


def test_worker_that_may_end_is_asked_again_and_then_stopped():
    known = observed(in_slot(0), in_slot(1), serving=ids(0, 1), draining=LEAVING)
    assert plan_group(ACTIVE, known, slots=1, now=NOW + 5) == [spare(1)]
    assert plan_group(ACTIVE, known, slots=1, now=NOW + 100) == [Stop(InstanceId("i1"), NOT_NEEDED)]
