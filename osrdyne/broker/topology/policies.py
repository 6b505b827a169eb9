"""The policies of a pool as data: of its request queues, of single keys with another delivery limit, of the audit, and
of the controller's queues.

Policies and not arguments, because their values may change while the queues exist. A changed TTL applies to new
messages only (broker: one-policy).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from osrdyne.amqp.version import BrokerVersion
from osrdyne.broker.topology.declarations import NEVER
from osrdyne.config.models import Settings
from osrdyne.protocol.names import Key, PoolNames

# RabbitMQ applies the policy with the highest priority to a queue, and no other.
PRIORITY = 100  # Above an operator's policy for all queues, which commonly has priority 0.
KEY_PRIORITY = 101  # The policy of a single key replaces that of the pool.
MAX_RETURNS = 20
"""How often a message of a client may return to its queue because the term of the leader that held it ended. A message
that ends terms would otherwise be delivered to every later leader."""
_ANY_SIZE = 2**50  # Bytes; above every limit that the arguments of a stream can have.


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy; `pattern` is a regular expression for names."""

    name: str
    pattern: str
    apply_to: str
    definition: Mapping[str, object]
    priority: int = PRIORITY

    def to_json(self) -> dict[str, object]:
        return {
            "pattern": self.pattern,
            "apply-to": self.apply_to,
            "definition": dict(self.definition),
            "priority": self.priority,
        }


def pool_policy(settings: Settings, version: BrokerVersion, *, longest_ttl: float | None = None) -> PolicySpec:
    """The policy of the pool's request queues; it matches no other queue.

    `longest_ttl`: the longest time-to-live of the routes of a managed pool, in seconds. Dead letters stay until `P-dl`
    has confirmed them (at-least-once), which needs `reject-publish` (broker: at-least-once-dead-lettering).
    """
    names = PoolNames(settings.pool.id)
    requests = settings.requests
    definition: dict[str, object] = {
        "dead-letter-exchange": names.dead_letter_exchange,
        "dead-letter-strategy": "at-least-once",
        # Not `drop-head`: a full queue must refuse the newest request, so that its publisher gets a negative confirm.
        "overflow": "reject-publish",
        # A changed TTL applies to new messages only, so it is set before routes with a longer one are used.
        "message-ttl": _longest_ttl_ms(settings, longest_ttl),
        "delivery-limit": allowed_returns(requests.delivery_limit),
    }
    if version.has_consumer_timeout_policy:
        definition["consumer-timeout"] = _milliseconds(settings.effective_consumer_timeout())
    if requests.max_length is not None:
        definition["max-length"] = requests.max_length
    if requests.max_length_bytes is not None:
        definition["max-length-bytes"] = requests.max_length_bytes
    return PolicySpec(
        name=names.policy, pattern=names.request_queue_pattern(), apply_to="queues", definition=definition
    )


def pool_policies(
    settings: Settings, version: BrokerVersion, *, longest_ttl: float | None = None
) -> tuple[PolicySpec, ...]:
    """All policies of a pool besides those of single keys. `longest_ttl`: as for `pool_policy`."""
    names = PoolNames(settings.pool.id)
    policies = (
        pool_policy(settings, version, longest_ttl=longest_ttl),
        controller_policy(names),
        inbox_policy(settings, longest_ttl=longest_ttl),
        poison_policy(settings),
        audit_policy(settings),
    )
    return policies if settings.telemetry.name is None else (*policies, log_policy(names))


def controller_policy(names: PoolNames) -> PolicySpec:
    """The policy of the controller's queues. It changes nothing: it only keeps away a policy for all queues, whose TTL
    would remove dead letters from `P-dl` while no controller runs (broker: one-policy)."""
    return PolicySpec(
        name=names.controller_policy,
        pattern=names.controller_queue_pattern(),
        apply_to="queues",
        definition={"delivery-limit": NEVER},  # as in the arguments of these queues
    )


def inbox_policy(settings: Settings, *, longest_ttl: float | None = None) -> PolicySpec:
    """The policy of the queues from which the leader takes messages of clients. Expired and returned orphans become
    dead letters, which are answered, and cancels are dropped. `longest_ttl`: as for `pool_policy`."""
    names = PoolNames(settings.pool.id)
    return PolicySpec(
        name=names.inbox_policy,
        pattern=names.inbox_pattern(),
        apply_to="queues",
        definition={"delivery-limit": MAX_RETURNS, "message-ttl": _longest_ttl_ms(settings, longest_ttl)},
    )


def poison_policy(settings: Settings) -> PolicySpec:
    """The policy of the poison inventory: the oldest entries go when it is full, because their callers are answered."""
    names = PoolNames(settings.pool.id)
    return _of_queue(
        names.poison_policy,
        names.poison_queue,
        {
            "delivery-limit": NEVER,
            "max-length-bytes": settings.requests.poison_max_bytes,
            "overflow": "drop-head",
        },
    )


def log_policy(names: PoolNames) -> PolicySpec:
    """The policy of the streams of the log of telemetry, which keeps away others as `controller_policy` does: RabbitMQ
    applies the lower one of its limit and the stream's own."""
    return PolicySpec(
        name=names.log_policy,
        pattern=names.log_stream_pattern(),
        apply_to="queues",
        definition={"max-length-bytes": _ANY_SIZE},
    )


def audit_policy(settings: Settings) -> PolicySpec:
    """The policy of the audit queue. RabbitMQ applies the lower one of its values and the queue's arguments."""
    names = PoolNames(settings.pool.id)
    return _of_queue(
        names.audit_policy,
        names.audit_queue,
        {
            # A change has two records: one before it, one with its outcome.
            "max-length": 2 * settings.audit.max_changes,
            "message-ttl": _milliseconds(settings.audit.max_age),
        },
    )


def _of_queue(name: str, queue: str, definition: Mapping[str, object]) -> PolicySpec:
    """A policy of one queue, by its whole name."""
    return PolicySpec(name=name, pattern=f"^{re.escape(queue)}$", apply_to="queues", definition=definition)


def allowed_returns(delivery_limit: int) -> int:
    """The `delivery-limit` of RabbitMQ, which is how often a message may return to its queue, so that it dies when
    `delivery_limit` deliveries have failed."""
    return delivery_limit - 1


def key_policy(pool: PolicySpec, names: PoolNames, key: Key, *, delivery_limit: int) -> PolicySpec:
    """The policy of the request queues of one key: that of the pool with another delivery limit."""
    return PolicySpec(
        name=names.key_policy(key),
        pattern=names.key_queue_pattern(key),
        apply_to=pool.apply_to,
        definition={**pool.definition, "delivery-limit": allowed_returns(delivery_limit)},
        priority=KEY_PRIORITY,
    )


def _longest_ttl_ms(settings: Settings, longest_ttl: float | None) -> int:
    return _milliseconds(max(settings.requests.ttl, longest_ttl or 0.0))


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
