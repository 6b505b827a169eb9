"""What becomes of the requests of one queue when it is looked through for expired ones. Pure; `queue_cleaner` acts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from osrdyne.amqp import Delivery, Message
from osrdyne.protocol.deadlines import is_past, remaining_expiration
from osrdyne.protocol.messages import DUPLICATE_HEADER, FAILED_DELIVERIES_HEADER, HOPS_HEADER, Request
from osrdyne.protocol.names import QueueName
from osrdyne.protocol.statuses import Status


@dataclass(frozen=True, slots=True)
class Held:
    """A request that the cleaner has taken out of its queue."""

    delivery: Delivery
    request: Request

    @property
    def deadline_ms(self) -> int | None:
        return self.request.deadline_ms


@dataclass(frozen=True, slots=True)
class Cleaning:
    """What has to be done: `dead` are dead letters, with the reason; `kept` go back in this order."""

    dead: Sequence[tuple[Held, Status]]
    kept: Sequence[Held]


def decide(taken: Iterable[Delivery], *, delivery_limit: int, now_ms: int, skew_ms: int) -> Cleaning:
    """Which of the requests of a queue, in the order taken, stay in it.

    What was given back comes before what was never delivered: a worker that gives a request back while the queue is
    being read had it before all of the others.
    """
    held = [Held(delivery, delivery.to_request(now_ms=now_ms)) for delivery in taken]
    held.sort(key=lambda one: not one.delivery.redelivered)
    dead: list[tuple[Held, Status]] = []
    kept: list[Held] = []
    for one in held:
        if is_past(one.deadline_ms, now_ms=now_ms, skew_ms=skew_ms):
            dead.append((one, Status.EXPIRED))
        elif one.request.delivery_count > delivery_limit:
            dead.append((one, Status.DELIVERY_LIMIT))
        else:
            kept.append(one)
    return Cleaning(dead, kept)


def copy_of(held: Held, *, now_ms: int, skew_ms: int) -> Message:
    """The message that takes the request's place.

    RabbitMQ begins to count its deliveries anew, so the count is carried on. It is marked, because a crash before the
    first one is acknowledged leaves both.
    """
    # One that was tried before has lost its hops; with them it is said that `expiration` counts from now.
    headers = {HOPS_HEADER: 0, **held.delivery.headers, DUPLICATE_HEADER: True}
    if held.request.delivery_count:
        headers[FAILED_DELIVERIES_HEADER] = held.request.delivery_count
    expiration = remaining_expiration(held.deadline_ms, now_ms=now_ms - skew_ms)
    return held.delivery.to_message(headers=headers, expiration=expiration)


def dead_letter_of(held: Held, reason: Status, queue: QueueName) -> Message:
    """What RabbitMQ would make of the request: the dead letter responder answers it, or keeps it as poison."""
    message = held.delivery.to_message(headers=held.delivery.headers, expiration=None)
    death = {"x-first-death-reason": reason.value, "x-first-death-queue": str(queue)}
    return replace(message, headers={**message.headers, **death})
