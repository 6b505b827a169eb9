"""Plan the next step for one request queue, as a pure function of desired and observed state.

Each rule prevents a counterexample of the model (docs/design/lifecycle.md).
"""

from __future__ import annotations

from enum import StrEnum

from osrdyne.pool.state.groups.transitions import GroupStatus
from osrdyne.pool.state.observed import Binding, ObservedQueue, ObservedWorkers


class QueueStep(StrEnum):
    """The next step of the actor of a key."""

    DECLARE = "declare"
    CHECK = "check"
    BIND = "bind"
    UNBIND = "unbind"
    DELETE = "delete"
    DISPOSE = "dispose"
    WAIT_FOR_STOP = "wait for stop"
    WAIT_FOR_SETTLE = "wait for settle"
    WAIT_FOR_WORKERS = "wait for workers"
    WAIT_FOR_TOTAL = "wait for total"
    KEEP = "keep"
    DONE = "done"


def plan_queue(
    desired: GroupStatus | None,
    queue: ObservedQueue,
    workers: ObservedWorkers,
    *,
    now: float,
    settle_delay: float,
    messages: int | None,
) -> QueueStep:
    """Return the next step for one request queue (lifecycle: one-actor-per-key, bind-waits-for-stop, always-unbind,
    settle, delete-preconditions, total-for-hidden-messages, delete-runs-to-its-end, several-queues-per-group).

    `messages`: the queue's total in a sample from after `delete_evidence_after`; None: not known yet.
    """
    # Before everything else: a group that is desired again is bound, however far its end has come.
    if desired is GroupStatus.ACTIVE:
        return _plan_bound(queue, workers)
    if not queue.exists:
        return QueueStep.DONE
    if queue.binding is not Binding.UNBOUND or queue.unbound_at is None:
        return QueueStep.UNBIND  # always sent, whatever the observed binding (lifecycle: always-unbind)
    # Unbound is the goal here: the queue stays until the group is ended.
    if desired is GroupStatus.UNBOUND:
        return QueueStep.DONE
    # A publish that was routed before the unbind may still be on its way into the queue (lifecycle: settle).
    if now < queue.unbound_at + settle_delay:
        return QueueStep.WAIT_FOR_SETTLE
    # A worker may hold a request that no total shows on every kind of queue (lifecycle: delete-preconditions).
    if not workers.is_empty:
        return QueueStep.WAIT_FOR_WORKERS
    if messages is None:
        return QueueStep.WAIT_FOR_TOTAL
    return QueueStep.KEEP if messages else QueueStep.DELETE


def _plan_bound(queue: ObservedQueue, workers: ObservedWorkers) -> QueueStep:
    if not queue.exists:
        return QueueStep.DECLARE
    if queue.unverified:
        return QueueStep.CHECK  # before a bind: binding a missing queue closes the token channel
    if queue.is_bound:
        return QueueStep.DISPOSE if queue.disposable else QueueStep.DONE
    # The stop would hit a worker that has just got a request (lifecycle: bind-waits-for-stop).
    return QueueStep.WAIT_FOR_STOP if workers.stopping else QueueStep.BIND


def stop_evidence_after(queue: ObservedQueue, *, settle_delay: float) -> float | None:
    """Monotonic time after which a sample proves that an UNBOUND queue is empty, so that its workers may be stopped
    (lifecycle: idle-needs-a-fresh-total).

    None: its unbind has not been answered in this term, so no sample proves it.
    """
    if not queue.exists or queue.binding is not Binding.UNBOUND or queue.unbound_at is None:
        return None
    return queue.unbound_at + settle_delay


def delete_evidence_after(queue: ObservedQueue, workers: ObservedWorkers, *, settle_delay: float) -> float | None:
    """Monotonic time after which a sample proves that the queue may be deleted (lifecycle: total-for-hidden-messages);
    None until it has settled and has no worker.

    The probe alone sees neither dead letters that wait for their confirm nor delayed messages.
    """
    settled = stop_evidence_after(queue, settle_delay=settle_delay)
    if settled is None or workers.empty_since is None:
        return None
    # The later of both: a sample in between may miss what a worker has returned.
    return max(settled, workers.empty_since)
