"""Compares the declarations of a daemon with RabbitMQ: exchanges, the controller's queues, bindings and the policy.

The leader compares every few seconds and repairs (`pool.queues.topology_watch`); `osrdyne doctor` compares and reports.
Request queues and their bindings are not compared here, but by `pool.queues.resync` and when a request returns. The
queries are for single objects, whose cost does not grow with the number of request queues. Changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.management.models import ListedBinding, ListedExchange
from osrdyne.broker.queues.retry_queues import retry_bindings, retry_exchanges, retry_queues
from osrdyne.broker.topology.declarations import (
    Declaration,
    Exchange,
    ExchangeBinding,
    Queue,
    QueueBinding,
    Topology,
    pool_topology,
)
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.broker.topology.policies import PolicySpec
from osrdyne.protocol.names import Key, PoolNames


class ObjectKind(StrEnum):
    """The kind of an object; also the label `object` of `osrdyne_topology_repairs_total`."""

    EXCHANGE = "exchange"
    QUEUE = "queue"
    BINDING = "binding"
    POLICY = "policy"
    PARAMETER = "parameter"


class Problem(StrEnum):
    """How an object deviates. Only an operator can resolve a conflict: an object of the same name with other arguments,
    or a policy with precedence."""

    MISSING = "missing"
    CHANGED = "changed"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class Deviation:
    """One object that differs from its declaration. `repair`: the object to declare or put; None for a conflict."""

    kind: ObjectKind
    name: str
    problem: Problem
    detail: str
    repair: Declaration | PolicySpec | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.name} {self.detail}"


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected objects. `queues`: the names of the controller's queues, and of one request queue as a sample for
    all. `key_policy_prefix`: the beginning of the names of policies of single keys, which are put and deleted with
    their queues."""

    topology: Topology
    policies: tuple[PolicySpec, ...]
    queues: tuple[str, ...]
    key_policy_prefix: str


def expected_topology(
    names: PoolNames, *, managed: bool, priorities: Iterable[int] = (), delays_ms: Iterable[int] = ()
) -> Topology:
    """All declarations of a daemon besides request queues, for the used priorities and delays."""
    base = pool_topology(names.pool)
    if not managed:
        return base
    levels, delays = sorted(priorities), sorted(delays_ms)
    parts = (
        base,
        QueueLayout(names, managed=True).exchanges_for(levels),
        retry_exchanges(names, levels),
        retry_queues(names, delays),
        retry_bindings(names, delays),
    )
    return Topology(tuple(item for part in parts for item in part.declarations))


def expected_objects(names: PoolNames, topology: Topology, policies: Sequence[PolicySpec]) -> Expected:
    # Also without a declaration of the leader queue, which the leader leaves to its token channel.
    controller = dict.fromkeys([names.leader_queue, *(queue.name for queue in topology.queues)])
    return Expected(topology, tuple(policies), (names.request_queue(Key("a")), *controller), names.key_policy_prefix)


async def compare(management: ManagementClient, expected: Expected, *, pool: str) -> list[Deviation]:
    """All deviations, in the order of repair. Raises `BrokerError` if the HTTP API does not answer."""
    topology = expected.topology
    exchanges = {found.name: found for found in await management.find_exchanges(f"{pool}-")}
    queues = {str(queue.name): await management.get_queue_arguments(queue.name) for queue in topology.queues}
    sources = {
        item.exchange if isinstance(item, QueueBinding) else item.source
        for item in topology.declarations
        if isinstance(item, QueueBinding | ExchangeBinding)
    }
    bindings = [
        binding
        for source in sorted(sources & exchanges.keys())
        for binding in await management.list_source_bindings(source)
    ]
    policies = await management.list_policies()
    found = [_compare_one(item, exchanges, queues, bindings) for item in topology.declarations]
    return [
        *filter(None, found),
        *_compare_policies(expected, policies),
        *_compare_operator_policies(expected, await management.list_operator_policies()),
    ]


def _compare_one(
    item: Declaration,
    exchanges: Mapping[str, ListedExchange],
    queues: Mapping[str, Mapping[str, object] | None],
    bindings: Sequence[ListedBinding],
) -> Deviation | None:
    match item:
        case Exchange(name, kind, arguments):
            exchange = exchanges.get(name)
            if exchange is None:
                return Deviation(ObjectKind.EXCHANGE, name, Problem.MISSING, "is missing", item)
            actual = (exchange.kind, exchange.durable, exchange.auto_delete, dict(exchange.arguments))
            if actual != (kind, True, False, dict(arguments)):
                detail = f"exists with another type or other arguments ({exchange.kind}, {dict(exchange.arguments)})"
                return Deviation(ObjectKind.EXCHANGE, name, Problem.CONFLICT, detail)
        case Queue(name, arguments):
            found = queues.get(name)
            if found is None:
                return Deviation(ObjectKind.QUEUE, name, Problem.MISSING, "is missing", item)
            if dict(found) != dict(arguments):
                return Deviation(
                    ObjectKind.QUEUE, name, Problem.CONFLICT, f"exists with other arguments ({dict(found)})"
                )
        case QueueBinding(queue, source, routing_key, arguments):
            wanted = ListedBinding(source, queue, False, routing_key, arguments)
            if not _has(bindings, wanted):
                name = f"{source} → {queue}"
                return Deviation(ObjectKind.BINDING, name, Problem.MISSING, "is missing", item)
        case ExchangeBinding(destination, source, arguments):
            if not _has(bindings, ListedBinding(source, destination, True, "", arguments)):
                name = f"{source} → {destination}"
                return Deviation(ObjectKind.BINDING, name, Problem.MISSING, "is missing", item)
        case _:
            assert_never(item)
    return None


def _has(bindings: Sequence[ListedBinding], wanted: ListedBinding) -> bool:
    return any(
        (one.source, one.destination, one.to_exchange, one.routing_key, dict(one.arguments))
        == (wanted.source, wanted.destination, wanted.to_exchange, wanted.routing_key, dict(wanted.arguments))
        for one in bindings
    )


def _compare_policies(expected: Expected, policies: Sequence[PolicySpec]) -> list[Deviation]:
    existing = {one.name: one for one in policies}
    own = {one.name for one in expected.policies}
    foreign = [one for one in policies if one.name not in own and not one.name.startswith(expected.key_policy_prefix)]
    deviations = []
    for ours in expected.policies:
        found = existing.get(ours.name)
        if found is None:
            deviations.append(Deviation(ObjectKind.POLICY, ours.name, Problem.MISSING, "is missing", ours))
        elif found != ours:
            detail = "differs from the settings"
            deviations.append(Deviation(ObjectKind.POLICY, ours.name, Problem.CHANGED, detail, ours))
        deviations += [
            Deviation(
                ObjectKind.POLICY,
                one.name,
                Problem.CONFLICT,
                f"has priority {one.priority} and displaces {ours.name} on {displaced[0]}: lower its priority, or "
                "change its pattern so that it does not match the pool's queues",
            )
            for one in foreign
            if one.priority >= ours.priority and (displaced := _shared(one, ours, expected.queues))
        ]
    return deviations


def _shared(one: PolicySpec, other: PolicySpec, queues: Sequence[str]) -> list[str]:
    """The queues to which RabbitMQ may apply either policy."""
    return [queue for queue in queues if _applies(one, queue) and _applies(other, queue)]


_REMOVES_MESSAGES = frozenset({"message-ttl", "expires", "max-length", "max-length-bytes", "delivery-limit"})
"""Elements of a policy by which a queue of the controller loses messages that must be answered or kept."""
_REMOVES_REQUEST_QUEUES = frozenset({"expires"})
"""The same for request queues, whose requests are answered as dead letters when one of the others removes them."""


def _compare_operator_policies(expected: Expected, policies: Sequence[PolicySpec]) -> list[Deviation]:
    """RabbitMQ applies an operator policy besides any other policy, so no policy of the pool can keep it away."""
    sample, *controller = expected.queues
    deviations = []
    for one in policies:
        harmful = _REMOVES_MESSAGES & one.definition.keys()
        queues = [name for name in controller if harmful and _applies(one, name)]
        if not queues and _applies(one, sample):
            harmful, queues = _REMOVES_REQUEST_QUEUES & one.definition.keys(), [sample]
        if queues and harmful:
            detail = (
                f"is an operator policy and sets {', '.join(sorted(harmful))} on {', '.join(queues)}, so requests may "
                "be lost, and the pool cannot prevent it: change its pattern so that it does not match these queues"
            )
            deviations.append(Deviation(ObjectKind.POLICY, one.name, Problem.CONFLICT, detail))
    return deviations


def _applies(policy: PolicySpec, queue: str) -> bool:
    """Whether RabbitMQ applies the policy to the queue; False for a pattern that only Erlang can compile."""
    if policy.apply_to not in {"all", "queues", "quorum_queues"}:
        return False
    try:
        return re.search(policy.pattern, queue) is not None
    except re.error:
        return False
