"""Compares what a daemon declares with what RabbitMQ has: exchanges, the controller's queues, bindings and the policy.

The leader compares every few seconds and repairs (`pool.topology_watch`); `osrdyne doctor` compares and reports.
Request queues and their bindings are not part of it: `pool.resync` and returned requests look after them. The HTTP API
is asked for single objects, whose price does not grow with the number of request queues. Nothing here changes anything.
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
    """What deviates; also the label `object` of `osrdyne_topology_repairs_total`."""

    EXCHANGE = "exchange"
    QUEUE = "queue"
    BINDING = "binding"
    POLICY = "policy"
    PARAMETER = "parameter"


class Problem(StrEnum):
    """How an object deviates. Only a conflict needs a person: what has the name cannot be changed, or comes first."""

    MISSING = "missing"
    CHANGED = "changed"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class Deviation:
    """One object that is not as the daemon declares it. `repair`: what to declare or to put; None for a conflict."""

    kind: ObjectKind
    name: str
    problem: Problem
    detail: str
    repair: Declaration | PolicySpec | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.name} {self.detail}"


@dataclass(frozen=True, slots=True)
class Expected:
    """All that must be there. `requests_sample`: a name that every request queue of the pool stands for.
    `key_policy_prefix`: with it begin the policies of single keys, which come and go with their queues."""

    topology: Topology
    policy: PolicySpec
    requests_sample: str
    key_policy_prefix: str


def expected_topology(
    names: PoolNames, *, managed: bool, priorities: Iterable[int] = (), delays_ms: Iterable[int] = ()
) -> Topology:
    """Everything that a daemon declares besides request queues; `priorities` and `delays_ms` are those in use."""
    base = pool_topology(names.pool)
    if not managed:
        return base
    classes, delays = sorted(priorities), sorted(delays_ms)
    parts = (
        base,
        QueueLayout(names, managed=True).exchanges_for(classes),
        retry_exchanges(names, classes),
        retry_queues(names, delays),
        retry_bindings(names, delays),
    )
    return Topology(tuple(item for part in parts for item in part.declarations))


def expected_objects(names: PoolNames, topology: Topology, policy: PolicySpec) -> Expected:
    return Expected(topology, policy, str(names.request_queue(Key("a"))), names.key_policy_prefix)


async def compare(management: ManagementClient, expected: Expected, *, pool: str) -> list[Deviation]:
    """Every deviation, in the order in which it is repaired. Raises `BrokerError` when the HTTP API does not answer."""
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
    return [*filter(None, found), *_compare_policies(expected, policies)]


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
    ours = expected.policy
    found = next((one for one in policies if one.name == ours.name), None)
    deviations = []
    if found is None:
        deviations.append(Deviation(ObjectKind.POLICY, ours.name, Problem.MISSING, "is missing", ours))
    elif found != ours:
        detail = "has other values than the settings ask for"
        deviations.append(Deviation(ObjectKind.POLICY, ours.name, Problem.CHANGED, detail, ours))
    deviations += [
        Deviation(
            ObjectKind.POLICY,
            one.name,
            Problem.CONFLICT,
            f"has priority {one.priority} and displaces {ours.name} on request queues of the pool",
        )
        for one in policies
        if one.name != ours.name
        and not one.name.startswith(expected.key_policy_prefix)
        and one.priority >= ours.priority
        and _applies(one, expected.requests_sample)
    ]
    return deviations


def _applies(policy: PolicySpec, queue: str) -> bool:
    """Whether RabbitMQ applies the policy to the queue; a pattern that only Erlang understands counts as no."""
    if policy.apply_to not in {"all", "queues", "quorum_queues"}:
        return False
    try:
        return re.search(policy.pattern, queue) is not None
    except re.error:
        return False
