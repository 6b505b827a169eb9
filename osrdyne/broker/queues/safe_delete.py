"""Prove that no message of a quorum queue is held, and delete the queue while the proof holds. The outcomes of both.

Source: lifecycle: "Deleting a queue", broker: prove-before-delete. Zero messages and zero consumers may be the answer
of a queue whose Raft leader is down; only a queue with a leader counts the probe as its one consumer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum

from osrdyne.amqp import Channel, Delivery, QueueInfo
from osrdyne.errors import BrokerNotFoundError
from osrdyne.logs import get_logger


class DeleteOutcome(StrEnum):
    """Whether a queue was deleted; each outcome but DELETED is the reason why not."""

    DELETED = "deleted"
    NOT_EMPTY = "not empty"
    IN_USE = "in use"
    NO_EVIDENCE = "no evidence"


class QueueCheck(StrEnum):
    """The state in RabbitMQ of the queues of a group that the leader considers bound."""

    INTACT = "intact"
    MISSING = "missing"
    """At least one queue of the group does not exist."""
    UNBOUND = "unbound"
    """All exist, at least one binding does not."""
    UNKNOWN = "unknown"
    """All exist; the HTTP API did not answer whether they are bound."""


# The answer of a queue that has no other consumer than the probe, and no unacknowledged message.
PROBE_ALONE = QueueInfo(ready=0, consumers=1)


def judge_look_up(info: QueueInfo) -> DeleteOutcome | None:
    """Return the reason in one passive declare not to delete, or None: the probe decides (lifecycle:
    ready-brings-back)."""
    if info.ready > 0:
        return DeleteOutcome.NOT_EMPTY
    if info.consumers > 0:
        return DeleteOutcome.IN_USE
    return None


def judge_probe(first: QueueInfo, second: QueueInfo, deliveries: int) -> DeleteOutcome | None:
    """Return the reason in the answers with the probe attached not to delete, or None: the queue is proven empty
    (lifecycle: probe)."""
    if deliveries or first.ready or second.ready:
        return DeleteOutcome.NOT_EMPTY
    if first == second == PROBE_ALONE:
        return None
    # Above one: also a connection that RabbitMQ has not noticed as dead. Zero: the queue's leader does not answer.
    return DeleteOutcome.IN_USE if max(first.consumers, second.consumers) > 1 else DeleteOutcome.NO_EVIDENCE


async def delete_if_proven_empty(
    channel: Channel,
    queue: str,
    *,
    delete: Callable[[], Awaitable[int]],
    give_back: Callable[[Delivery], Awaitable[None]],
) -> DeleteOutcome:
    """Prove with a probe on `channel` that no message of `queue` is held, and delete it with the probe attached.

    `delete` sends the deletion over the token channel. `give_back` publishes a message that the probe received to the
    request exchange and returns once that is confirmed; then the message is acknowledged. The caller closes `channel`.
    """
    try:
        # Before a probe, which would take requests from the workers of a queue in use.
        refusal = judge_look_up(await channel.declare_queue(queue, passive=True))
    except BrokerNotFoundError:
        return DeleteOutcome.DELETED  # by another client
    if refusal is not None:
        return refusal
    # Without a prefetch limit: from here on, every request that is ready, or that returns from a lost connection, is
    # delivered to the probe and counted.
    probe = await channel.consume(queue)
    first = await channel.declare_queue(queue, passive=True)
    # The first answer may overtake a delivery to the probe; the second one does not.
    second = await channel.declare_queue(queue, passive=True)
    # After the second answer: everything that RabbitMQ delivered before it has arrived.
    refusal = judge_probe(first, second, probe.waiting())
    if refusal is None:
        # With the probe attached (lifecycle: delete-under-probe). Crash before it: the queue stays, unbound.
        lost = await delete()
        if lost:
            get_logger("probe").error("queue proven empty held messages", queue=queue, messages=lost)
    else:
        # The queue stays, and the probe must not take further requests from its workers.
        await channel.cancel(probe)
    while probe.waiting():
        # Also after a deletion: deliveries outlive their queue.
        delivery = await probe.get()
        await give_back(delivery)
        # After the confirm. Crash in between: a duplicate.
        await delivery.ack()
    return DeleteOutcome.DELETED if refusal is None else refusal
