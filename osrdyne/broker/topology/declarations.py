"""The exchanges, queues and bindings of a pool besides its request queues, as data in the order of their declaration.

The orphan queue is declared before the requests exchange, which therefore never has requests that it cannot route. The
alternate exchange is an argument and not a policy: RabbitMQ applies one policy to an exchange, so a policy of an
operator could replace it, and RabbitMQ would confirm and drop requests.

All queues are quorum queues: a classic queue, and with it the pool, is unavailable while its node is down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from osrdyne.protocol.names import KEY_ARGUMENT, Key, PoolNames, QueueName
from osrdyne.protocol.progress import INQUIRY_TTL_MS

# A delivery limit that is never reached: by default RabbitMQ 4 drops a message after 20 returns, and -1 fails on 3.10
# (broker: count-failures-by-reject).
NEVER = 1_000_000
_BOUNDED_LENGTH = 10_000
_CANCEL_TTL_MS = 60_000
# Limits of the audit queue without its policy, which sets lower ones (`policies.audit_policy`).
MAX_AUDIT_MESSAGES = 60_000  # Below the largest prefetch, which has 16 bits.
MAX_AUDIT_BYTES = 64 * 2**20
MAX_AUDIT_AGE_MS = 49 * 86_400_000  # RabbitMQ refuses 2**32 ms.


@dataclass(frozen=True, slots=True)
class Exchange:
    """A durable exchange."""

    name: str
    kind: str
    arguments: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Queue:
    """A durable queue."""

    name: QueueName
    arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class QueueBinding:
    """A binding of a queue to an exchange; a fanout exchange ignores the routing key."""

    queue: QueueName
    exchange: str
    routing_key: str = ""
    arguments: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExchangeBinding:
    """A binding that routes messages of `source` to the exchange `destination` if the arguments match their headers."""

    destination: str
    source: str
    arguments: Mapping[str, object]


Declaration = Exchange | Queue | QueueBinding | ExchangeBinding


@dataclass(frozen=True, slots=True)
class Topology:
    """Declarations in the order they are made."""

    declarations: tuple[Declaration, ...]

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return tuple(item for item in self.declarations if isinstance(item, Exchange))

    @property
    def queues(self) -> tuple[Queue, ...]:
        return tuple(item for item in self.declarations if isinstance(item, Queue))


def pool_topology(pool: str) -> Topology:
    """The exchanges, queues and bindings of a pool. Source: docs/reference/protocol/names.md."""
    names = PoolNames(pool)
    return Topology(
        (
            # The single active consumer is the leader (broker: single-active-consumer).
            Queue(names.leader_queue, _quorum(single_consumer=True)),
            *_fanout(names.dead_letter_exchange, names.dead_letter_queue, _quorum(single_consumer=True)),
            *_fanout(names.poison_exchange, names.poison_queue, _quorum()),
            *_fanout(
                names.orphan_exchange,
                names.orphan_queue,
                # A request that expires while it waits for a controller is answered, so it stays until `P-dl` has
                # confirmed it. That needs this overflow, although the queue has no length limit (broker:
                # at-least-once-dead-lettering).
                _quorum(single_consumer=True)
                | {
                    "x-dead-letter-exchange": names.dead_letter_exchange,
                    "x-dead-letter-strategy": "at-least-once",
                    "x-overflow": "reject-publish",
                },
            ),
            Exchange(names.requests_exchange, "direct", {"alternate-exchange": names.orphan_exchange}),
            *_fanout(names.activity_exchange, names.activity_queue, _quorum(single_consumer=True) | _bounded()),
            Exchange(names.control_exchange, "topic"),
            Exchange(names.credit_exchange, "direct"),
            *_fanout(
                names.cancel_exchange,
                names.cancel_queue,
                _quorum(single_consumer=True) | _bounded() | {"x-message-ttl": _CANCEL_TTL_MS},
            ),
            *_fanout(
                names.progress_exchange,
                names.progress_queue,
                _quorum(single_consumer=True) | _bounded() | {"x-message-ttl": INQUIRY_TTL_MS},
            ),
            *_fanout(
                names.audit_exchange,
                names.audit_queue,
                _quorum()
                | {
                    "x-max-length": MAX_AUDIT_MESSAGES,
                    "x-max-length-bytes": MAX_AUDIT_BYTES,
                    "x-overflow": "drop-head",
                    "x-message-ttl": MAX_AUDIT_AGE_MS,
                },
            ),
        )
    )


def request_queue_arguments(names: PoolNames, key: Key) -> dict[str, object]:
    """Arguments of a request queue. Values that may change later are in the pool's policy.

    The dead letter exchange is in both: requests that expire while the policy is missing, because it was deleted by
    hand, are answered.
    """
    return {
        **_former_arguments(key),
        "x-dead-letter-exchange": names.dead_letter_exchange,
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }


def is_request_queue_of(names: PoolNames, key: Key, arguments: Mapping[str, object]) -> bool:
    """Whether a queue with these arguments is a request queue of the key, also one that 0.1 has declared."""
    return dict(arguments) in (request_queue_arguments(names, key), _former_arguments(key))


def _former_arguments(key: Key) -> dict[str, object]:
    return {"x-queue-type": "quorum", KEY_ARGUMENT: key}


def _fanout(exchange: str, queue: QueueName, arguments: Mapping[str, object]) -> tuple[Declaration, ...]:
    return Exchange(exchange, "fanout"), Queue(queue, arguments), QueueBinding(queue, exchange)


def _quorum(*, single_consumer: bool = False) -> dict[str, object]:
    # Without an effective delivery limit: messages of the controller's queues return at each hard takeover.
    arguments: dict[str, object] = {"x-queue-type": "quorum", "x-delivery-limit": NEVER}
    return arguments | ({"x-single-active-consumer": True} if single_consumer else {})


def _bounded() -> dict[str, object]:
    """Keep the newest messages only: these messages may be lost, and the queue must not grow without limit."""
    return {"x-max-length": _BOUNDED_LENGTH, "x-overflow": "drop-head"}
