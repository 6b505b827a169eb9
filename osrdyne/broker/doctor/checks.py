"""Checks of the requirements of a pool on RabbitMQ: pure functions of facts that `run` gathers. Each finding has its
remedy."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from itertools import dropwhile, pairwise

from osrdyne.amqp.version import BrokerVersion
from osrdyne.broker.management.models import NodeStatus, Permissions, QueueHistory, QueueTotals, Whoami
from osrdyne.broker.queues.retry_queues import retry_queue_arguments
from osrdyne.broker.topology.comparison import Deviation, Problem
from osrdyne.broker.topology.declarations import pool_topology
from osrdyne.broker.topology.telemetry import LogPlan
from osrdyne.config.models import Settings
from osrdyne.findings import Finding
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.rates import LONGEST_REQUEST

# RabbitMQ's default consumer timeout in seconds; the HTTP API does not show the configured one (broker:
# consumers-differ-by-version).
GLOBAL_CONSUMER_TIMEOUT = 1800.0
# Quorum queues, and their dead lettering at least once.
NEEDED_FEATURE_FLAGS = frozenset({"quorum_queue", "stream_queue"})
_MANY_SAMPLES = 3  # In which messages returned, or a queue grew: a change of the leader is one or two.
_MUCH_GROWTH = 100  # Messages.
_MANY_FILES = 0.8  # Share of the open files of a node above which it needs a higher limit.


def check_version(version: BrokerVersion) -> Finding:
    """Whether this RabbitMQ is supported, and its differences from other versions."""
    if not version.is_supported:
        return Finding(
            "RabbitMQ version", False, f"RabbitMQ {version} is too old.", "Upgrade to 3.10 or later; 4.3 is best."
        )
    known = "is supported" if version.is_tested else "is newer than any that osrdyne was tested with (3.10 to 4.3)"
    return Finding("RabbitMQ version", True, f"RabbitMQ {version} {known}. {' '.join(differences(version))}")


def differences(version: BrokerVersion) -> list[str]:
    """The differences of this version from others, as sentences. Source: broker: count-failures-by-reject,
    consumers-differ-by-version."""
    sentences = []
    if version.has_consumer_timeout_policy:
        sentences.append("The pool's policy sets the consumer timeout.")
    else:
        sentences.append("The consumer timeout is that of rabbitmq.conf, because a policy cannot set it before 3.12.")
    if version.cancels_on_consumer_timeout:
        sentences.append("A consumer timeout cancels the consumer and the worker opens a new channel.")
    else:
        sentences.append("A consumer timeout closes the channel and counts as a failed delivery.")
    if version.counts_nack:
        sentences.append("A request that a worker returns when it stops counts as a failed delivery too.")
    else:
        sentences.append("A request that a worker returns when it stops does not count as a failed delivery.")
    if version.has_default_delivery_limit:
        sentences.append("Queues have explicit delivery limits in place of RabbitMQ's own of 20.")
    return sentences


def check_consumer_timeout(settings: Settings, version: BrokerVersion) -> Finding:
    """Whether the consumer timeout is longer than a worker may hold a request."""
    subject, processing = "consumer timeout", settings.worker.processing_timeout
    configured = settings.requests.consumer_timeout
    if version.has_consumer_timeout_policy:
        limit = settings.effective_consumer_timeout()
        remedy = "Raise requests.consumer_timeout above it, or leave it out."
    else:
        limit = GLOBAL_CONSUMER_TIMEOUT if configured is None else configured
        wanted = round((processing + 300) * 1000)
        remedy = (
            f"Before RabbitMQ 3.12 only the node can change it: set consumer_timeout = {wanted} in rabbitmq.conf, "
            f"restart RabbitMQ, and set requests.consumer_timeout: {wanted // 1000}s."
        )
    if processing > limit:
        message = f"worker.processing_timeout ({processing:g} s) is longer than RabbitMQ's limit ({limit:g} s)."
        return Finding(subject, False, message, remedy)
    message = f"A worker may hold a request for {limit:g} s."
    # Each request that the worker holds may need `LONGEST_REQUEST` seconds at its rate.
    wait = settings.worker.concurrency * LONGEST_REQUEST
    if settings.worker.concurrency > 1 and processing + wait > limit:
        node = "" if version.has_consumer_timeout_policy else "consumer_timeout of rabbitmq.conf and "
        message += (
            f" If the quotas have rates, it may wait there for {wait:g} s before it runs: raise {node}"
            f"requests.consumer_timeout to {processing + wait:g} s, or lower worker.concurrency or "
            "worker.processing_timeout."
        )
    return Finding(subject, True, message)


def check_tags(whoami: Whoami, *, scoped_credentials: bool = False) -> list[Finding]:
    subject = "user tags"
    grant = f"Set its tags: rabbitmqctl set_user_tags {whoami.user}"
    if scoped_credentials and not whoami.may_make_users:
        message = f"The user {whoami.user!r} may not create users, which broker.scoped_credentials needs."
        return [Finding(subject, False, message, f"{grant} administrator; or turn broker.scoped_credentials off.")]
    if not whoami.may_set_policies:
        return [Finding(subject, False, f"The user {whoami.user!r} may not set policies.", f"{grant} policymaker.")]
    if not whoami.may_monitor:
        message = f"The user {whoami.user!r} may not see alarms and limits of the nodes."
        return [Finding(subject, False, message, f"{grant} policymaker monitoring.", fatal=False)]
    return [Finding(subject, True, f"The user {whoami.user!r} may set policies and see the nodes.")]


def check_permissions(permissions: Permissions | None, *, pool: str, user: str, vhost: str) -> Finding:
    """Whether the user may configure, write and read every name of the pool, and send replies."""
    subject = "permissions"
    patterns = (f"^{pool}-", f"^({pool}-.*|amq\\.default)$", f"^{pool}-")
    remedy = f"Grant them: {shlex.join(['rabbitmqctl', 'set_permissions', '-p', vhost, user, *patterns])}"
    if permissions is None:
        message = f"The user {user!r} has no permissions on the virtual host {vhost!r}, or it does not exist."
        return Finding(subject, False, message, remedy)
    names = pool_names(pool)
    missing = [
        f"{verb} {name}"
        for verb, pattern, wanted in (
            ("configure", permissions.configure, names),
            ("write", permissions.write, [*names, "amq.default"]),
            ("read", permissions.read, names),
        )
        for name in wanted
        if not _grants(pattern, name)
    ]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return Finding(subject, False, f"The user {user!r} may not {missing[0]}{more} on {vhost!r}.", remedy)
    return Finding(subject, True, f"The user {user!r} may configure, write and read all names of the pool.")


def pool_names(pool: str) -> list[str]:
    """The names of the pool, with one request queue as a sample."""
    topology = pool_topology(pool)
    exchanges = [exchange.name for exchange in topology.exchanges]
    queues = [queue.name for queue in topology.queues]
    return [*exchanges, *queues, PoolNames(pool).request_queue(Key("a+b"))]


def _grants(pattern: str, name: str) -> bool:
    """Whether RabbitMQ grants the name; True for a pattern that only Erlang can compile."""
    try:
        return re.search(pattern or "^$", name) is not None
    except re.error:
        return True


def check_feature_flags(disabled: Iterable[str]) -> Finding:
    missing = sorted(NEEDED_FEATURE_FLAGS & set(disabled))
    if missing:
        remedy = "Run rabbitmqctl enable_feature_flag all; it is a part of every upgrade."
        return Finding("feature flags", False, f"Not enabled on this RabbitMQ: {', '.join(missing)}.", remedy)
    return Finding("feature flags", True, "The feature flags for quorum queues are enabled.")


def check_clock(offset: float | None, *, allowed: float) -> Finding:
    """Whether RabbitMQ's clock agrees with this host's, as a sample for the clocks of clients and workers: deadlines
    are absolute times."""
    subject = "clock"
    if offset is None:
        return Finding(subject, True, "RabbitMQ returned no time.")
    if abs(offset) > allowed + 1.0:  # the Date header is cut to seconds
        where = "ahead of" if offset > 0 else "behind"
        return Finding(
            subject,
            False,
            f"RabbitMQ's clock is {abs(offset):.0f} s {where} this host's; {allowed:g} s are allowed.",
            "Synchronise both clocks (NTP): deadlines of requests are absolute times.",
            fatal=False,
        )
    return Finding(subject, True, "The clocks of RabbitMQ and this host agree.")


def check_nodes(nodes: Sequence[NodeStatus]) -> list[Finding]:
    """Alarms, which block every publisher, and resources that are nearly used up."""
    findings = [finding for node in nodes for finding in _check_node(node)]
    return findings or [Finding("alarms and limits", True, f"No alarm on {len(nodes)} node(s), and room to grow.")]


def _check_node(node: NodeStatus) -> Iterable[Finding]:
    if not node.running:
        message = f"The node {node.name} is down; a queue needs the majority of its nodes."
        yield Finding("nodes", False, message, "Start it again.", fatal=False)
    if node.memory_alarm:
        message = f"The memory alarm of {node.name} blocks all publishers."
        yield Finding("alarms", False, message, "Give it more memory, or drain queues.")
    if node.disk_alarm:
        message = f"The disk alarm of {node.name} blocks all publishers."
        yield Finding("alarms", False, message, "Free disk space below its data directory.")
    if node.files_used is not None and node.files_limit and node.files_used > _MANY_FILES * node.files_limit:
        message = f"{node.name} has {node.files_used} of at most {node.files_limit} files open."
        yield Finding("file descriptors", False, message, "Raise its limit (ulimit -n, LimitNOFILE).", fatal=False)


def check_topology(deviations: Sequence[Deviation], *, declared: bool) -> list[Finding]:
    """Whether RabbitMQ has the objects that a daemon declares. `declared`: whether it has any object of the pool."""
    subject = "topology"
    if not declared:
        return [Finding(subject, True, "Nothing of the pool is declared yet: its first daemon declares it.")]
    if not deviations:
        return [Finding(subject, True, "Exchanges, queues, bindings and policy of the pool are as declared.")]
    return [
        Finding(
            subject, False, f"The {one}.", _TOPOLOGY_REMEDIES[one.problem], fatal=one.problem is not Problem.CHANGED
        )
        for one in deviations
    ]


_TOPOLOGY_REMEDIES = {
    Problem.MISSING: "A running daemon declares it again within lifecycle.topology_interval; otherwise start one.",
    Problem.CHANGED: "A daemon puts the policy of its own settings: restart it if these settings are newer.",
    Problem.CONFLICT: "Remove it, or use another pool.id; drain a queue first.",
}


def check_retry_queues(queues: Iterable[QueueTotals], *, pool: str) -> list[Finding]:
    """Whether a queue with the name of a wait queue has other arguments."""
    names, subject = PoolNames(pool), "wait queues"
    delays = {names.delay_of_retry_queue(queue.name): queue for queue in queues}
    others = [
        queue.name
        for delay_ms, queue in delays.items()
        if delay_ms is not None and dict(queue.arguments) != retry_queue_arguments(names, delay_ms)
    ]
    if not others:
        return []
    message = f"Retries are off where they need {', '.join(sorted(others))}: the queue exists with other arguments."
    return [Finding(subject, False, message, "Drain and delete it, or use another pool.id.", fatal=False)]


def controller_queues(pool: str) -> list[str]:
    """The queues that the leader consumes, without that of its token."""
    names = PoolNames(pool)
    return [
        str(name)
        for name in (
            names.orphan_queue, names.dead_letter_queue, names.activity_queue, names.cancel_queue, names.progress_queue
        )
    ]  # fmt: skip


def check_controller_queues(histories: Iterable[QueueHistory]) -> list[Finding]:
    """Whether a queue of the leader delivers the same messages again and again, or grows although it is consumed."""
    subject = "controller queues"
    findings = []
    for queue in histories:
        is_held = bool(queue.lengths) and queue.lengths[-1] > 0
        if is_held and _increases(queue.redelivered) >= _MANY_SAMPLES:
            message = f"{queue.name} delivers messages again and again: leaders that take them may fail."
        elif is_held and queue.consumers and _grows(queue.lengths):
            message = f"{queue.name} has a leader and grows: {queue.lengths[-1]} messages wait."
        else:
            continue
        remedy = "See docs/how-to/clear-a-controller-queue.md; a purge while a daemon runs removes little."
        findings.append(Finding(subject, False, message, remedy, fatal=False))
    return findings or [Finding(subject, True, "No queue of the leader returns its messages or grows.")]


def _grows(lengths: Sequence[int]) -> bool:
    known = [*dropwhile(lambda length: not length, lengths)]  # RabbitMQ shows 0 before its statistics begin
    has_shrunk = any(later < earlier for earlier, later in pairwise(known))
    return known[-1] - known[0] >= _MUCH_GROWTH and not has_shrunk and _increases(known) >= _MANY_SAMPLES


def _increases(samples: Sequence[int]) -> int:
    return sum(later > earlier for earlier, later in pairwise(samples))


def check_log(plan: LogPlan, *, name: str) -> list[Finding]:
    """Whether the log of telemetry agrees with the settings."""
    subject = "telemetry"
    if not plan.conflicts:
        streams = ", ".join(queue.name for queue in plan.streams)
        return [Finding(subject, True, f"The log {name} has {plan.partitions} partitions: {streams}.")]
    return [Finding(subject, False, conflict, fatal=not plan.partitions) for conflict in plan.conflicts]


def check_policy(queues: Iterable[QueueTotals], *, pool: str) -> Finding:
    """Whether another policy applies to request queues, instead of the pool's: only one applies to a queue."""
    names = PoolNames(pool)
    ours = names.policy
    found = {queue.policy for queue in queues if queue.policy is not None}
    others = sorted(name for name in found if name != ours and not name.startswith(names.key_policy_prefix))
    if others:
        return Finding(
            "queue policy",
            False,
            f"The policy {others[0]!r} applies to request queues of the pool and displaces {ours!r}: "
            "there expired and failed requests are not answered.",
            "Lower its priority, or change its pattern so that it does not match the pool's queues.",
        )
    return Finding("queue policy", True, "No other policy applies to the pool's request queues.")
