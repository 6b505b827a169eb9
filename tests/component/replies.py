"""A queue for the replies to requests, on a broker in memory, and what has been answered there."""

from osrdyne.aio.clock import Clock
from osrdyne.protocol.statuses import decode_text
from osrdyne.testing.fakes.broker import FakeBroker

REPLIES = "replies"


def broker_with_replies(clock: Clock) -> FakeBroker:
    broker = FakeBroker(clock)
    broker.declare_queue(REPLIES, {})
    return broker


def answers(broker: FakeBroker, queue: str = REPLIES) -> list[tuple[str | None, str | None]]:
    """(correlation id, status) of every answer so far."""
    return [
        (stored.message.correlation_id, decode_text(stored.message.headers.get("x-status")))
        for stored in broker.queues[queue].ready
    ]


def died(reason: object, *, queue: object = "pool-req-a") -> dict[str, object]:
    """The headers of a dead letter of RabbitMQ."""
    return {"x-death": [{"queue": queue, "reason": reason}]}
