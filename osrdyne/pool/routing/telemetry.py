"""The log of telemetry in one term: declared by the leader, written by the ingress.

A leader uses the log that it finds. A changed setting stops no device: `status` and `doctor` report it until an
operator acts (`broker.topology.telemetry`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from osrdyne.broker.management.models import QueueTotals
from osrdyne.broker.topology.declarations import Topology
from osrdyne.broker.topology.telemetry import LogPlan, plan_log, streams_of
from osrdyne.findings import Finding
from osrdyne.ingress.telemetry import Log
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext

COMPONENT = "telemetry"


class QueueListing(Protocol):
    """The queues of RabbitMQ whose name begins with a prefix."""

    async def list_queues(self, prefix: str) -> list[QueueTotals]: ...


class ActiveLog:
    """The log of one pool; a pool without `telemetry.name` has none. `declare` returns when RabbitMQ has written the
    new streams to disk."""

    def __init__(
        self, context: TermContext, *, management: QueueListing, declare: Callable[[Topology], Awaitable[None]]
    ) -> None:
        self._names, self._settings = context.names, context.settings.telemetry
        self._management = management
        self._declare = declare
        self.plan = LogPlan()
        self.log = Log(self._settings.name)
        self._log: Logger = get_logger(COMPONENT, pool=context.names.pool)

    @property
    def topology(self) -> Topology:
        """The streams that have to be declared."""
        return self.plan.topology

    async def load(self) -> None:
        """Find the streams, and declare missing ones, before the first message for the log is taken. Raises
        `BrokerError`."""
        if self._settings.name is None:
            return
        listed = await self._management.list_queues(self._names.log_stream_prefix)
        found = streams_of(self._names, listed)
        self.plan = plan_log(self._names, self._settings, found)
        self.log = Log(self._settings.name, self.plan.partitions)
        for conflict in self.plan.conflicts:
            self._log.error("log of telemetry differs from the settings", problem=conflict)
        missing = tuple(
            queue for queue in self.plan.streams if self._names.partition_of_log_stream(queue.name) not in found
        )
        if missing:
            # Crash within: some streams exist, each with the number of partitions, and the next leader declares the
            # others.
            await self._declare(Topology(missing))
            self._log.info("log of telemetry declared", streams=[queue.name for queue in missing])

    def finding(self) -> Finding | None:
        """The finding for `status`; None for a pool without a log."""
        if self._settings.name is None:
            return None
        if self.plan.conflicts:
            return Finding(COMPONENT, False, self.plan.conflicts[0], fatal=not self.plan.partitions)
        return Finding(COMPONENT, True, f"the log {self._settings.name} has {self.plan.partitions} partitions")
