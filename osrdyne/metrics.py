"""All Prometheus metrics of the controller, in one object that components get as a parameter (no module state).

No label holds a key or a secret: keys are unbounded, and values of single groups are in the HTTP API. Labels with names
of routes are limited to the manifests that were active while this daemon led, because a message may claim any name.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SLOW = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


OTHER = "other"  # Label for values that are not known.


def priority_label(priority: int | None) -> str:
    return "default" if priority is None else str(priority)


class Metrics:
    """One set of metrics; every instance has a registry of its own, so that tests share none."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.leading = Gauge("osrdyne_leading", "1 while this daemon leads its pool.", registry=registry)
        self.term = Gauge("osrdyne_term", "The current term while leading, else 0.", registry=registry)
        self.terms_lost = Counter("osrdyne_terms_lost", "Terms that ended with an error.", registry=registry)
        self.groups = Gauge("osrdyne_groups", "Worker groups by expected state.", ["state"], registry=registry)
        self.groups_waiting = Gauge(
            "osrdyne_groups_waiting", "Groups that wait because of max_groups.", registry=registry
        )
        self.distinct_keys = Gauge(
            "osrdyne_distinct_keys", "Different keys since the start of this daemon.", registry=registry
        )
        self.orphans = Counter("osrdyne_orphans", "Orphaned requests by outcome.", ["outcome"], registry=registry)
        self.forward_seconds = Histogram(
            "osrdyne_forward_seconds",
            "Time from the delivery of an orphan to the confirm of its forward.",
            buckets=_FAST,
            registry=registry,
        )
        self.activation_seconds = Histogram(
            "osrdyne_activation_seconds", "Time until the queue of a key is bound.", buckets=_FAST, registry=registry
        )
        self.dead_letters = Counter(
            "osrdyne_dead_letters",
            "Dead letters answered, by reason, route and priority.",
            ["reason", "route", "priority"],
            registry=registry,
        )
        self.put_back = Counter(
            "osrdyne_put_back",
            "Requests at RabbitMQ's delivery limit that returned to their queue, because they had failed less often.",
            registry=registry,
        )
        self.replies_failed = Counter(
            "osrdyne_replies_failed", "Replies of the controller that no queue accepted.", registry=registry
        )
        self.activity = Counter("osrdyne_activity_reports", "Activity reports by event.", ["event"], registry=registry)
        self.invalid_messages = Counter(
            "osrdyne_invalid_messages", "Malformed messages, by queue.", ["queue"], registry=registry
        )
        self.forged_messages = Counter(
            "osrdyne_forged_messages",
            "Messages that did not come through the pool's own exchange and were dropped, by queue.",
            ["queue"],
            registry=registry,
        )
        self.forged_reply_to = Counter(
            "osrdyne_forged_reply_to",
            "Requests dropped because no answer may be sent to their reply address, by component.",
            ["component"],
            registry=registry,
        )
        self.queue_commands = Counter(
            "osrdyne_queue_commands", "Commands on request queues, by command.", ["command"], registry=registry
        )
        self.deletes_refused = Counter(
            "osrdyne_queue_deletes_refused", "Deletions without proof that the queue is empty.", registry=registry
        )
        self.audit_records = Counter(
            "osrdyne_audit_records",
            "Records of changes through the API, by result: stored in RabbitMQ, lost.",
            ["result"],
            registry=registry,
        )
        self.api_refused = Counter(
            "osrdyne_api_refused",
            "Requests of the API that were answered 401 or 403, by status.",
            ["status"],
            registry=registry,
        )
        self.topology_repairs = Counter(
            "osrdyne_topology_repairs",
            "Repairs of objects that were missing or changed in RabbitMQ, by kind of object.",
            ["object"],
            registry=registry,
        )
        self._add_managed(registry)
        self._add_classes(registry)
        self._add_workers(registry)

    def _add_managed(self, registry: CollectorRegistry) -> None:
        self.ingress = Counter(
            "osrdyne_ingress",
            "Requests of a managed pool by outcome, route and priority.",
            ["outcome", "route", "priority"],
            registry=registry,
        )
        self.telemetry_messages = Counter(
            "osrdyne_telemetry_messages",
            "Messages that the log of telemetry has confirmed, by partition.",
            ["partition"],
            registry=registry,
        )
        self.telemetry_bytes = Counter(
            "osrdyne_telemetry_bytes", "Bytes in the bodies of messages in the log of telemetry.", registry=registry
        )
        self.telemetry_lag_messages = Gauge(
            "osrdyne_telemetry_lag_messages",
            "Messages of the log that a reader has not read, by reader and partition.",
            ["reader", "partition"],
            registry=registry,
        )
        self.telemetry_lag_seconds = Gauge(
            "osrdyne_telemetry_lag_seconds",
            "Age of the oldest message that a reader has not read, by reader and partition.",
            ["reader", "partition"],
            registry=registry,
        )
        self.telemetry_lag_drained = Gauge(
            "osrdyne_telemetry_lag_drained_seconds",
            "Seconds until a reader has read all messages at the present rates; infinite: never.",
            ["reader"],
            registry=registry,
        )
        self.telemetry_ingests = Counter(
            "osrdyne_telemetry_ingests",
            "Ended ingests by outcome: stored, empty, conflict, failed.",
            ["table", "outcome"],
            registry=registry,
        )
        self.telemetry_stored_events = Counter(
            "osrdyne_telemetry_stored_events",
            "Events that ingests have stored, by table and partition.",
            ["table", "partition"],
            registry=registry,
        )
        self.telemetry_invalid_events = Counter(
            "osrdyne_telemetry_invalid_events",
            "Invalid events that ingests have stored, by table and partition.",
            ["table", "partition"],
            registry=registry,
        )
        self.telemetry_old_events = Counter(
            "osrdyne_telemetry_old_events",
            "Stored events that were more than a year old when they arrived, by table and partition.",
            ["table", "partition"],
            registry=registry,
        )
        self.telemetry_copies = Counter(
            "osrdyne_telemetry_copies",
            "Messages that ingests have dropped or marked as copies.",
            ["table"],
            registry=registry,
        )
        self.telemetry_purged_rows = Counter(
            "osrdyne_telemetry_purged_rows",
            "Rows that ingests have removed from the table because of its storage limit.",
            ["table"],
            registry=registry,
        )
        self.telemetry_table_rows = Gauge(
            "osrdyne_telemetry_table_rows",
            "Rows of the table, including invalid events.",
            ["table"],
            registry=registry,
        )
        self.telemetry_table_bytes = Gauge(
            "osrdyne_telemetry_table_bytes", "Bytes of the files of the table.", ["table"], registry=registry
        )
        self.last_value_events = Gauge(
            "osrdyne_last_value_events",
            "Counts of the last-value reader since its store was created: events, written, late, future, invalid, lost "
            "offsets.",
            ["outcome"],
            registry=registry,
        )
        self.poison_drops = Counter(
            "osrdyne_poison_drops",
            "Copies of poison requests for the PoisonMessageDrop of their queue policy: sent, failed, dropped.",
            ["outcome"],
            registry=registry,
        )
        self.gone = Counter(
            "osrdyne_gone",
            "Requests answered `gone` because the queue of their key was being removed.",
            registry=registry,
        )
        self.cleaned = Counter(
            "osrdyne_cleaned",
            "Requests taken out of their queue by sweeps for expired ones, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self.cleaning_seconds = Histogram(
            "osrdyne_cleaning_seconds", "Duration of the sweep of one queue.", buckets=_FAST, registry=registry
        )
        self.enqueue_waiting = Gauge(
            "osrdyne_enqueue_waiting",
            "Requests that wait for their admission to a queue of limited length.",
            registry=registry,
        )
        self.evicted = Counter(
            "osrdyne_evicted",
            "Waiting requests that were answered `maxlen` because a later one displaced them.",
            registry=registry,
        )
        self.quota_used = Gauge(
            "osrdyne_quota_used_ratio",
            "Used share of a daily quota, by meter; the largest one if each name has a quota of its own.",
            ["meter"],
            registry=registry,
        )
        self.splits = Counter(
            "osrdyne_splits",
            "Requests whose key matches a rule of the splitter, by rule and whether the key was split.",
            ["rule", "outcome"],
            registry=registry,
        )
        self.conditions_limited = Counter(
            "osrdyne_conditions_limited",
            "Conditions of routes that reached the work limit for a request, and were undefined for it.",
            registry=registry,
        )
        self.refused_again = Counter(
            "osrdyne_refused_again",
            "Refused requests of a managed pool that were delivered before; they may be answered twice.",
            registry=registry,
        )

    def _add_classes(self, registry: CollectorRegistry) -> None:
        self._routes: set[str] = set()
        self.completed = Counter(
            "osrdyne_completed",
            "Requests that workers have reported as completed, by status of the answer.",
            ["status", "route", "priority"],
            registry=registry,
        )
        self.waiting = Gauge(
            "osrdyne_waiting_requests",
            "Requests in queues that no worker has taken, by priority, over all groups.",
            ["priority"],
            registry=registry,
        )
        self.oldest = Gauge(
            "osrdyne_oldest_waiting_seconds",
            "Waiting time of the oldest request in queues, by priority.",
            ["priority"],
            registry=registry,
        )
        self.retrying = Gauge(
            "osrdyne_retrying_requests",
            "Requests that wait for their next attempt, by delay in seconds, over all groups.",
            ["delay"],
            registry=registry,
        )

        self.circuit_fail_ratio = Gauge(
            "osrdyne_circuit_fail_ratio",
            "Percentage of the counted requests of a route that failed; of a route with several circuits the highest.",
            ["route"],
            registry=registry,
        )
        self.circuit_state = Gauge(
            "osrdyne_circuit_state",
            "State of the circuit of a route: 0 closed, 1 half open, 2 open; of several circuits the highest.",
            ["route"],
            registry=registry,
        )
        self.circuit_samples = Gauge(
            "osrdyne_circuit_samples",
            "Requests that the circuits of a route count now, by outcome.",
            ["route", "outcome"],
            registry=registry,
        )

    def know_routes(self, names: Iterable[str]) -> None:
        """Allow names of routes as labels."""
        self._routes.update(names)

    def of_route(self, route: object, priority: int | None) -> dict[str, str]:
        """The labels `route` and `priority` of a request. `route`: the name that a message claims, or None."""
        known = route in self._routes if isinstance(route, str) else False
        name = str(route) if known else OTHER if route else ""
        return {"route": name, "priority": priority_label(priority)}

    def _add_workers(self, registry: CollectorRegistry) -> None:
        self.workers = Gauge("osrdyne_workers", "Workers by state.", ["state"], registry=registry)
        self.worker_starts = Counter(
            "osrdyne_worker_starts", "Worker starts by outcome.", ["outcome"], registry=registry
        )
        self.start_seconds = Histogram(
            "osrdyne_worker_start_seconds", "Time until a worker is ready.", buckets=_SLOW, registry=registry
        )
        self.processes = Gauge(
            "osrdyne_processes", "Processes of pooled workers by state.", ["state"], registry=registry
        )
        self.process_start_seconds = Histogram(
            "osrdyne_process_start_seconds",
            "Parts of the start of a process of pooled workers: process, python, connection, jvm, session, warm_up, "
            "ready.",
            ["part"],
            buckets=_SLOW,
            registry=registry,
        )
        self.process_keys = Gauge(
            "osrdyne_process_keys", "Workers in a process of pooled workers, by slot.", ["slot"], registry=registry
        )
        self.process_heap = Gauge(
            "osrdyne_process_heap_bytes", "Used heap of a process, by slot.", ["slot"], registry=registry
        )
        self.process_memory = Gauge(
            "osrdyne_process_memory_bytes",
            "Proportional set size of a process with its JVM, by slot.",
            ["slot"],
            registry=registry,
        )
        self.assign_seconds = Histogram(
            "osrdyne_assign_seconds",
            "Time until a pooled worker is assigned to a process.",
            buckets=(*_FAST, 30.0, 60.0, 300.0),
            registry=registry,
        )
        self.memory_relief = Counter(
            "osrdyne_memory_relief", "Idle groups ended because the heap of their process was full.", registry=registry
        )
        self.process_memory_share = Gauge(
            "osrdyne_process_memory_share",
            "Used share of the memory of a process's host or cgroup, whichever is tighter, by slot.",
            ["slot"],
            registry=registry,
        )
        self.memory_pressure = Counter(
            "osrdyne_memory_pressure",
            "Groups and processes ended because the memory of a host or cgroup was short, by action.",
            ["action"],
            registry=registry,
        )
        self.cold_start_seconds = Histogram(
            "osrdyne_worker_cold_start_seconds",
            "Parts of a worker's start, as it reports them: process, python, jvm, session, load, first_query.",
            ["part"],
            buckets=_SLOW,
            registry=registry,
        )
        self.executor_seconds = Counter(
            "osrdyne_executor_seconds",
            "Time of tasks of all workers on executors, in seconds on one core, as reported by the workers.",
            registry=registry,
        )
        self.worker_exits = Counter("osrdyne_worker_exits", "Workers that ended by themselves.", registry=registry)
        self.mismarked_workers = Counter(
            "osrdyne_mismarked_workers",
            "Workers that the driver lists with the hash of other settings.",
            registry=registry,
        )
        self.workers_wanted = Gauge(
            "osrdyne_workers_wanted",
            "Desired number of workers, over all groups with scaling.",
            registry=registry,
        )
        self.scalings = Counter(
            "osrdyne_scalings", "Changes of a group's number of workers.", ["direction"], registry=registry
        )
        self.workers_drained = Counter(
            "osrdyne_workers_drained", "Workers that were replaced or not needed, and drained.", registry=registry
        )
