"""Prove that no message of a quorum queue is held, and delete the queue while the proof holds. The outcomes of both.

Source: lifecycle: "Deleting a queue", broker: prove-before-delete. A count of zero alone may be the answer of a queue
whose Raft leader does not answer;
a consumer of our own that the queue counts as the only holder can only be the answer of a living one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum

from osrdyne.amqp import Channel, Delivery, QueueInfo
from osrdyne.errors import BrokerNotFoundError
from osrdyne.logs import get_logger


class DeleteOutcome(StrEnum):
    """Only DELETED has deleted anything; each of the others is a reason to try later, or not at all."""

    DELETED = "deleted"
    NOT_EMPTY = "not empty"
    IN_USE = "in use"
    NO_EVIDENCE = "no evidence"


class QueueCheck(StrEnum):
    """RabbitMQ's answer about the queues of a group that the leader considers bound."""

    INTACT = "intact"
    MISSING = "missing"
    """At least one queue of the group does not exist."""
    UNBOUND = "unbound"
    """All exist, at least one binding does not."""
    UNKNOWN = "unknown"
    """All exist; the HTTP API did not say whether they are bound."""


# What the queue says when our probe is its only consumer and no message is unacknowledged.
OURS_ALONE = QueueInfo(ready=0, consumers=1)


def judge_cheaply(info: QueueInfo) -> DeleteOutcome | None:
    """A refusal from one passive declare, or None: the probe must decide (lifecycle: ready-brings-back)."""
    if info.ready > 0:
        return DeleteOutcome.NOT_EMPTY
    if info.consumers > 0:
        return DeleteOutcome.IN_USE
    return None


def judge_probe(first: QueueInfo, second: QueueInfo, deliveries: int) -> DeleteOutcome | None:
    """A refusal from the answers with the probe attached, or None: the queue is proven empty (lifecycle: probe)."""
    if deliveries or first.ready or second.ready:
        return DeleteOutcome.NOT_EMPTY
    if first == second == OURS_ALONE:
        return None
    # More than the probe: a dead connection that RabbitMQ has not noticed yet. None: the queue does not answer.
    return DeleteOutcome.IN_USE if max(first.consumers, second.consumers) > 1 else DeleteOutcome.NO_EVIDENCE


async def delete_if_proven_empty(
    channel: Channel,
    queue: str,
    *,
    delete: Callable[[], Awaitable[int]],
    give_back: Callable[[Delivery], Awaitable[None]],
) -> DeleteOutcome:
    """Prove with a probe on `channel` that no message of `queue` is held, and delete it with the probe attached.

    `delete` sends the deletion over the token channel. `give_back` publishes a message that the probe got to the
    request exchange and returns once that is confirmed; only then is it acknowledged here. The caller closes `channel`.
    """
    try:
        # Cheap, and harmless to workers: a probe on a queue in use would take requests from them.
        refusal = judge_cheaply(await channel.declare_queue(queue, passive=True))
    except BrokerNotFoundError:
        return DeleteOutcome.DELETED  # deleted by another client: the desired state is reached
    if refusal is not None:
        return refusal
    # Without a prefetch limit: everything that is ready comes to the probe and is counted.
    # From here on a request that returns from a lost connection comes to the probe, and is not deleted unseen.
    probe = await channel.consume(queue)
    first = await channel.declare_queue(queue, passive=True)
    # The first answer may overtake a delivery to the probe; the second one does not.
    second = await channel.declare_queue(queue, passive=True)
    # Counted after the second answer: whatever RabbitMQ delivered before it has arrived by now.
    refusal = judge_probe(first, second, probe.waiting())
    if refusal is None:
        # With the probe attached (lifecycle: delete-under-probe). Crash before: the queue stays, unbound. After: it is
        # gone, proven empty.
        lost = await delete()
        if lost:
            get_logger("probe").error("queue proven empty held messages", queue=queue, messages=lost)
    else:
        # The queue stays: the probe must take nothing more from its workers.
        await channel.cancel(probe)
    while probe.waiting():
        # Also after a deletion: the deliveries that the probe holds outlive their queue.
        delivery = await probe.get()
        await give_back(delivery)
        # Only now: the request is confirmed in the request exchange. Crash in between: a duplicate.
        await delivery.ack()
    return DeleteOutcome.DELETED if refusal is None else refusal
