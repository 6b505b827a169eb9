"""The decision which requests of a swept queue have expired, and the messages made of the others. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from osrdyne.amqp import Delivery, Message
from osrdyne.protocol.deadlines import is_past, remaining_expiration
from osrdyne.protocol.messages import DUPLICATE_HEADER, FAILED_DELIVERIES_HEADER, HOPS_HEADER, Request
from osrdyne.protocol.names import QueueName
from osrdyne.protocol.statuses import Status


@dataclass(frozen=True, slots=True)
class TakenRequest:
    """A request that the sweeper has taken out of its queue and not acknowledged."""

    delivery: Delivery
    request: Request

    @property
    def deadline_ms(self) -> int | None:
        return self.request.deadline_ms


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """The result of a sweep: `dead` become dead letters, each with its reason; `kept` are published again in this
    order."""

    dead: Sequence[tuple[TakenRequest, Status]]
    kept: Sequence[TakenRequest]


def plan_sweep(deliveries: Iterable[Delivery], *, delivery_limit: int, now_ms: int) -> SweepPlan:
    """Decide which requests stay in the queue; `deliveries` are in the order in which they were taken.

    Redelivered requests come first: a worker that requeues a request during the sweep took it before the sweep began.
    """
    taken = [TakenRequest(delivery, delivery.to_request(now_ms=now_ms)) for delivery in deliveries]
    # The sort is stable: within both parts the order of delivery, which is that of the queue, stays.
    taken.sort(key=lambda one: not one.delivery.redelivered)
    dead: list[tuple[TakenRequest, Status]] = []
    kept: list[TakenRequest] = []
    for one in taken:
        if is_past(one.deadline_ms, now_ms=now_ms):
            dead.append((one, Status.EXPIRED))
        # RabbitMQ counts the deliveries of its copy from zero: without this rule a request that kills workers would
        # never reach the limit.
        elif one.request.delivery_count >= delivery_limit:
            dead.append((one, Status.DELIVERY_LIMIT))
        else:
            kept.append(one)
    return SweepPlan(dead, kept)


def copy_of(taken: TakenRequest, *, now_ms: int) -> Message:
    """The message that replaces a request in its queue.

    RabbitMQ counts the deliveries of the copy from zero, so a header holds the count so far. The copy is marked as a
    possible duplicate, because a crash before the original is acknowledged leaves both.
    """
    # A request that waited for another attempt has lost its hops header. With it, `expiration` counts from now.
    headers = {HOPS_HEADER: 0, **taken.delivery.headers, DUPLICATE_HEADER: True}
    if taken.request.delivery_count:
        headers[FAILED_DELIVERIES_HEADER] = taken.request.delivery_count
    expiration = remaining_expiration(taken.deadline_ms, now_ms=now_ms)
    return taken.delivery.to_message(headers=headers, expiration=expiration)


def dead_letter_of(taken: TakenRequest, reason: Status, queue: QueueName) -> Message:
    """The dead letter that RabbitMQ would make of the request, for the dead letter responder."""
    message = taken.delivery.to_message(headers=taken.delivery.headers, expiration=None)
    # The header that RabbitMQ would set: the responder reads reason and queue from it.
    deaths = [{"reason": reason.value, "queue": str(queue)}]
    return replace(message, headers={**message.headers, "x-death": deaths})
