"""All Prometheus metrics of the controller, in one registry object that is passed around (no module state).

No label holds a key or a secret: keys are unbounded, and per-group figures are in the HTTP API.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SLOW = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """One set of metrics; every instance has a registry of its own, so that tests do not meet."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.leading = Gauge("osrdyne_leading", "1 while this daemon leads its pool.", registry=registry)
        self.term = Gauge("osrdyne_term", "The current term while leading, else 0.", registry=registry)
        self.terms_lost = Counter("osrdyne_terms_lost", "Terms that ended with an error.", registry=registry)
        self.groups = Gauge("osrdyne_groups", "Worker groups by expected state.", ["state"], registry=registry)
        self.groups_waiting = Gauge(
            "osrdyne_groups_waiting", "Groups that wait for a place under max_groups.", registry=registry
        )
        self.distinct_keys = Gauge(
            "osrdyne_distinct_keys", "Different keys used in the life of this daemon.", registry=registry
        )
        self.orphans = Counter(
            "osrdyne_orphans", "Orphaned requests by what became of them.", ["outcome"], registry=registry
        )
        self.ingress = Counter(
            "osrdyne_ingress",
            "Requests of a managed pool by what became of them, route and priority.",
            ["outcome", "route", "priority"],
            registry=registry,
        )
        self.splits = Counter(
            "osrdyne_splits",
            "Requests whose key a rule of the splitter matches, and whether it made another key of it.",
            ["rule", "outcome"],
            registry=registry,
        )
        self.forward_seconds = Histogram(
            "osrdyne_forward_seconds",
            "From taking an orphan to its confirmed forward.",
            buckets=_FAST,
            registry=registry,
        )
        self.activation_seconds = Histogram(
            "osrdyne_activation_seconds", "From requiring a key to its bound queue.", buckets=_FAST, registry=registry
        )
        self.dead_letters = Counter(
            "osrdyne_dead_letters", "Dead letters answered, by reason.", ["reason"], registry=registry
        )
        self.replies_failed = Counter(
            "osrdyne_replies_failed", "Replies of the controller that no queue took.", registry=registry
        )
        self.activity = Counter("osrdyne_activity_reports", "Activity reports by event.", ["event"], registry=registry)
        self.invalid_messages = Counter(
            "osrdyne_invalid_messages", "Messages that could not be understood, by queue.", ["queue"], registry=registry
        )
        self.queue_commands = Counter(
            "osrdyne_queue_commands", "Commands on request queues, by command.", ["command"], registry=registry
        )
        self.deletes_refused = Counter(
            "osrdyne_queue_deletes_refused", "Deletions that lacked proof of emptiness.", registry=registry
        )
        self._add_workers(registry)

    def _add_workers(self, registry: CollectorRegistry) -> None:
        self.workers = Gauge("osrdyne_workers", "Workers by state.", ["state"], registry=registry)
        self.worker_starts = Counter(
            "osrdyne_worker_starts", "Worker starts by outcome.", ["outcome"], registry=registry
        )
        self.start_seconds = Histogram(
            "osrdyne_worker_start_seconds", "From asking the driver to ready.", buckets=_SLOW, registry=registry
        )
        self.worker_exits = Counter("osrdyne_worker_exits", "Workers that ended by themselves.", registry=registry)
        self.workers_wanted = Gauge(
            "osrdyne_workers_wanted",
            "Workers that scaling wants, over all groups that it looks after.",
            registry=registry,
        )
        self.scalings = Counter(
            "osrdyne_scalings", "Changes of a group's number of workers.", ["direction"], registry=registry
        )
        self.workers_drained = Counter(
            "osrdyne_workers_drained", "Workers asked to finish and end, replaced or not needed.", registry=registry
        )
