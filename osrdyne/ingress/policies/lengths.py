"""MaxQueueLength with EnqueueTimeout and Overflow: the decision about a request for a full queue. Pure."""

from __future__ import annotations

from enum import StrEnum

from osrdyne.ingress.checks import Refusal
from osrdyne.ingress.policies.policy import MAX_INT, Overflow
from osrdyne.ingress.policies.table import FoundPolicy
from osrdyne.protocol.statuses import Status


class Step(StrEnum):
    """The next step with a request. EVICT: remove the oldest request to make room, then decide again."""

    ADMIT = "admit"
    WAIT = "wait"
    REJECT = "reject"
    DISCARD = "discard"
    EVICT = "evict"


_OVERFLOW = {
    Overflow.REJECT_INCOMING: Step.REJECT,
    Overflow.DISCARD_INCOMING: Step.DISCARD,
    Overflow.DISCARD_EXISTING: Step.EVICT,
}


def limits_length(found: FoundPolicy | None) -> bool:
    """Whether the policy limits the number of waiting requests; the default of MaxQueueLength is no limit."""
    return found is not None and found.policy.max_queue_length < MAX_INT


def next_step(found: FoundPolicy, *, has_room: bool, waited: float, is_crowded: bool) -> Step:
    """Decide about a request that has waited for `waited` seconds. `is_crowded`: the ingress holds so many waiting
    requests that none may wait any longer."""
    if has_room:
        return Step.ADMIT
    if waited < found.policy.enqueue_timeout and not is_crowded:
        return Step.WAIT
    return _OVERFLOW[found.policy.overflow]


def overflow_refusal(found: FoundPolicy, step: Step) -> Refusal:
    """The answer to a request that is rejected or discarded."""
    policy = found.policy
    full = f"{policy.max_queue_length} requests of this key wait, as many as MaxQueueLength of the {found.name} allows"
    if step is Step.DISCARD:
        return Refusal(Status.OK, f"Accepted and discarded: {full}.", discarded=True)
    return Refusal(Status.QUEUE_FULL, f"{full}, and there was no room within {policy.enqueue_timeout:g} s.")


def describe_length(found: FoundPolicy) -> str:
    """A sentence for `explain`."""
    policy = found.policy
    return (
        f"At most {policy.max_queue_length} requests of this key wait; one without room within "
        f"{policy.enqueue_timeout:g} s meets {policy.overflow.value}, by the {found.name}."
    )
