"""Frozen values of RabbitMQ's HTTP API, and functions that parse them from its JSON. Pure.

The functions accept any JSON: a foreign queue, with arguments of any type, must not break a listing (defects:
foreign-queues).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

from osrdyne.amqp.version import BrokerVersion
from osrdyne.broker.topology.policies import PolicySpec
from osrdyne.protocol.names import QueueName

# Seconds by which the totals of a listing may be older than the request; the oldest in measurements was 9.8 s (broker:
# totals-listing).
TOTALS_MAX_AGE = 10.0


@dataclass(frozen=True, slots=True)
class QueueTotals:
    """A queue in a listing. Counts are None if RabbitMQ reports none, and prove nothing then.

    `messages` also counts dead letters and delayed messages that are neither ready nor unacknowledged.
    """

    name: QueueName
    arguments: Mapping[str, object] = field(repr=False)
    messages: int | None
    ready: int | None
    unacknowledged: int | None
    state: str
    type: str
    policy: str | None
    sampled_after: float
    """Monotonic time; the counts are no older than this moment (lifecycle: idle-needs-a-fresh-total,
    total-for-hidden-messages)."""
    members_online: bool = False
    """Whether every node that has a copy of the queue is up."""

    @property
    def is_running(self) -> bool:
        return self.state == "running"


@dataclass(frozen=True, slots=True)
class QueueHistory:
    """The last minutes of a queue. `lengths` and `redelivered`: its messages, and how many it has delivered again since
    RabbitMQ counts, as samples of equal intervals, oldest first; empty if RabbitMQ keeps no statistics."""

    name: str
    consumers: int
    lengths: tuple[int, ...]
    redelivered: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Binding:
    """A binding of a queue."""

    queue: QueueName
    routing_key: str
    arguments: Mapping[str, object] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class ListedExchange:
    """An exchange in RabbitMQ."""

    name: str
    kind: str
    durable: bool
    auto_delete: bool
    arguments: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ListedBinding:
    """A binding in RabbitMQ; `destination` is an exchange if `to_exchange`."""

    source: str
    destination: str
    to_exchange: bool
    routing_key: str
    arguments: Mapping[str, object] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Overview:
    """`clock_offset`: RabbitMQ's clock minus this host's in seconds, to about one second; None if unknown."""

    version: BrokerVersion
    cluster_name: str
    clock_offset: float | None


@dataclass(frozen=True, slots=True)
class Whoami:
    user: str
    tags: frozenset[str]

    @property
    def may_set_policies(self) -> bool:
        return bool(self.tags & {"administrator", "policymaker"})

    @property
    def may_monitor(self) -> bool:
        return bool(self.tags & {"administrator", "monitoring"})

    @property
    def may_make_users(self) -> bool:
        return "administrator" in self.tags


@dataclass(frozen=True, slots=True)
class Permissions:
    """Regular expressions of the names a user may configure, write and read."""

    configure: str
    write: str
    read: str


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node of the cluster. Sizes in bytes; None if the node does not report them."""

    name: str
    running: bool
    memory_alarm: bool
    disk_alarm: bool
    memory_used: int | None
    memory_limit: int | None
    disk_free: int | None
    disk_limit: int | None
    files_used: int | None
    files_limit: int | None


def read_consuming_connections(item: Mapping[str, object]) -> int | None:
    """How many connections consume a queue; None if RabbitMQ keeps no statistics, or names no connection."""
    consumers = item.get("consumer_details")
    if not isinstance(consumers, list):
        return None
    names = {_mapping(_mapping(one).get("channel_details")).get("connection_name") for one in consumers}
    return None if None in names else len(names)


def read_history(name: str, item: Mapping[str, object]) -> QueueHistory:
    stats = _mapping(item.get("message_stats"))
    return QueueHistory(
        name,
        consumers=_count(item.get("consumers")) or 0,
        lengths=_samples(item.get("messages_details")),
        redelivered=_samples(stats.get("redeliver_details")),
    )


def _samples(details: object) -> tuple[int, ...]:
    listed = _mapping(details).get("samples")
    found = [_count(_mapping(one).get("sample")) for one in listed] if isinstance(listed, list) else []
    return tuple(one for one in reversed(found) if one is not None)  # RabbitMQ begins with the latest


def read_totals(item: object, *, asked_at: float) -> QueueTotals | None:
    """Parse a queue of a listing; None for an item without a name."""
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return None
    policy = item.get("policy")
    return QueueTotals(
        name=QueueName(item["name"]),
        arguments=_mapping(item.get("arguments")),
        messages=_count(item.get("messages")),
        ready=_count(item.get("messages_ready")),
        unacknowledged=_count(item.get("messages_unacknowledged")),
        state=str(item.get("state")),
        type=str(item.get("type")),
        policy=policy if isinstance(policy, str) and policy else None,
        sampled_after=asked_at - TOTALS_MAX_AGE,
        members_online=_are_online(item.get("members"), item.get("online")),
    )


def _are_online(members: object, online: object) -> bool:
    return (
        isinstance(members, list) and isinstance(online, list) and bool(members) and all(m in online for m in members)
    )


def read_binding(item: Mapping[str, Any]) -> Binding | None:
    """Parse a binding of a listing; None for a binding to an exchange."""
    if item.get("destination_type") != "queue":
        return None
    return Binding(
        queue=QueueName(str(item.get("destination"))),
        routing_key=str(item.get("routing_key")),
        arguments=_mapping(item.get("arguments")),
    )


def read_exchange(item: Mapping[str, Any]) -> ListedExchange:
    return ListedExchange(
        name=str(item.get("name")),
        kind=str(item.get("type")),
        durable=item.get("durable") is True,
        auto_delete=item.get("auto_delete") is True,
        arguments=_mapping(item.get("arguments")),
    )


def read_any_binding(item: Mapping[str, Any]) -> ListedBinding:
    return ListedBinding(
        source=str(item.get("source")),
        destination=str(item.get("destination")),
        to_exchange=item.get("destination_type") == "exchange",
        routing_key=str(item.get("routing_key")),
        arguments=_mapping(item.get("arguments")),
    )


def read_overview(item: Mapping[str, Any], *, date: str | None, now: float) -> Overview:
    return Overview(
        version=BrokerVersion.parse(str(item.get("rabbitmq_version", ""))),
        cluster_name=str(item.get("cluster_name", "")),
        clock_offset=_clock_offset(date, now),
    )


def read_whoami(item: Mapping[str, Any]) -> Whoami:
    tags = item.get("tags")
    names = tags if isinstance(tags, list) else str(tags or "").split(",")
    return Whoami(user=str(item.get("name", "")), tags=frozenset(str(name).strip() for name in names if name))


def read_permissions(item: Mapping[str, Any]) -> Permissions:
    return Permissions(
        configure=str(item.get("configure", "")), write=str(item.get("write", "")), read=str(item.get("read", ""))
    )


def read_node(item: Mapping[str, Any]) -> NodeStatus:
    return NodeStatus(
        name=str(item.get("name", "")),
        running=item.get("running") is True,
        memory_alarm=item.get("mem_alarm") is True,
        disk_alarm=item.get("disk_free_alarm") is True,
        memory_used=_count(item.get("mem_used")),
        memory_limit=_count(item.get("mem_limit")),
        disk_free=_count(item.get("disk_free")),
        disk_limit=_count(item.get("disk_free_limit")),
        files_used=_count(item.get("fd_used")),
        files_limit=_count(item.get("fd_total")),
    )


def read_policy(item: Mapping[str, Any]) -> PolicySpec:
    priority = item.get("priority")
    return PolicySpec(
        name=str(item.get("name", "")),
        pattern=str(item.get("pattern", "")),
        apply_to=str(item.get("apply-to", "")),
        definition=_mapping(item.get("definition")),
        priority=priority if isinstance(priority, int) else 0,
    )


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}  # RabbitMQ writes some empty tables as []


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _clock_offset(date: str | None, now: float) -> float | None:
    try:
        server_time = parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return None
    # The header has whole seconds: half a second is the mean of what was cut off.
    return server_time + 0.5 - now
