"""The topology watch: compares the declared objects with those of RabbitMQ at intervals, and repairs differences.

Missing exchanges, queues and bindings are declared again on a channel of their own; the policy and parameters are put
through the HTTP API. Nothing is deleted, and nothing is sent over the token channel. Before a repair the leader
confirms that it still leads: a deposed leader would otherwise compete with its successor for the policy. An object with
other arguments, or another policy with a higher priority, needs an operator: it is logged and shown by `status`. The
leader queue is left out: its loss ends the term, and the next term declares it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from osrdyne.aio.signals import Wakeup
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.topology.comparison import Deviation, ObjectKind, Problem, compare, expected_objects
from osrdyne.broker.topology.declarations import Queue, QueueBinding, Topology
from osrdyne.broker.topology.policies import PolicySpec
from osrdyne.errors import BrokerConflictError, BrokerError, LeadershipLostError
from osrdyne.findings import Finding
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import Lease
from osrdyne.protocol.names import QueueName

LEAST_PAUSE = 1.0  # Minimum seconds between two comparisons, however often one is requested.
COMPONENT = "topology"


class KeptParameter(Protocol):
    """A global parameter that the daemon keeps in RabbitMQ. `name`: its name there."""

    @property
    def name(self) -> str: ...

    async def is_missing(self) -> bool:
        """Whether the parameter was stored and RabbitMQ does not have it."""
        ...

    async def store_again(self) -> None:
        """Store the latest value again."""
        ...


class TopologyWatch:
    """Watches the objects of one pool in one term.

    `expected` returns what has to be declared now, and `declare` declares it. `declare_retry_queues` declares the retry
    queues. `verify_bindings` has the bindings of all request queues checked.
    """

    def __init__(
        self,
        context: TermContext,
        *,
        expected: Callable[[], Topology],
        policies: Callable[[], Sequence[PolicySpec]],
        parameters: Sequence[KeptParameter],
        management: ManagementClient,
        declare: Callable[[Topology], Awaitable[None]],
        declare_retry_queues: Callable[[], Awaitable[None]],
        verify_bindings: Callable[[], None],
        lease: Lease,
    ) -> None:
        self._names = context.names
        self._expected = expected
        self._policies = policies
        self._parameters = parameters
        self._management = management
        self._declare = declare
        self._declare_retry_queues = declare_retry_queues
        self._verify_bindings = verify_bindings
        self._lease = lease
        self._interval = context.settings.lifecycle.topology_interval
        self._clock = context.clock
        self._metrics = context.metrics
        self._wakeup = Wakeup(context.clock)
        self._compared_at = context.clock.monotonic()
        self._repairs = 0
        self._last_repair = ""
        self._conflicts: list[Deviation] = []
        self._failure: str | None = None
        self._log: Logger = get_logger(COMPONENT, pool=context.names.pool)

    async def run(self) -> None:
        """Compare at intervals, and soon after `check_soon`. Runs until cancelled; raises `LeadershipLostError`."""
        while True:
            await self._wakeup.wait(self._interval)
            try:
                await self.check()
                self._failure = None
            except LeadershipLostError:
                # Never retried: without the lease this daemon must change nothing any more (lifecycle: lease).
                raise
            except BrokerError as error:
                self._failure = str(error)
                self._log.warning("topology check failed", error=str(error))
            await self._clock.sleep(min(LEAST_PAUSE, self._interval))

    def check_soon(self) -> None:
        """Request a comparison, because an object may be missing."""
        self._wakeup.set()

    async def check(self) -> None:
        """Compare once, and repair what differs."""
        expected = self._expected()
        # The leader queue is left to the token channel: a new one without a token is a matter of leadership.
        declarations = tuple(item for item in expected.declarations if not self._is_leader_queue(item))
        objects = expected_objects(self._names, Topology(declarations), self._policies())
        deviations = await compare(self._management, objects, pool=self._names.pool)
        self._note_conflicts([one for one in deviations if one.problem is Problem.CONFLICT])
        repairable = [one for one in deviations if one.repair is not None]
        if repairable:
            # Before the first change: a deposed leader would declare what the new one is about to change.
            await self._lease.confirm()
            await self._repair(repairable)
        for parameter in self._parameters:
            if await parameter.is_missing():
                await self._lease.confirm()
                await parameter.store_again()
                self._note_repair(Deviation(ObjectKind.PARAMETER, parameter.name, Problem.MISSING, "is missing"))
        self._compared_at = self._clock.monotonic()

    def _is_leader_queue(self, item: object) -> bool:
        return isinstance(item, Queue) and item.name == self._names.leader_queue

    async def _repair(self, deviations: Sequence[Deviation]) -> None:
        declarations, retry_queues_differ = [], False
        for one in deviations:
            if isinstance(one.repair, PolicySpec):
                # The policy first: a queue that is declared without it has no limits until it applies. Not `repair`
                # itself, because the routes may have changed since.
                await self._management.put_policy(next(p for p in self._policies() if p.name == one.name))
                self._note_repair(one)
            elif isinstance(one.repair, Queue | QueueBinding) and self._is_of_retry_queue(one.repair):
                retry_queues_differ = True
            elif one.repair is not None:
                declarations.append(one.repair)
        try:
            await self._declare(Topology(tuple(declarations)))
        except BrokerConflictError as error:  # declared by another client since the comparison
            self._log.error("pool object exists with other arguments", error=error.message)
            return
        if retry_queues_differ:
            # By their own loop: it has the refused delays, and persists new queues before they are bound.
            await self._declare_retry_queues()
        for one in deviations:
            if not isinstance(one.repair, PolicySpec):
                self._note_repair(one)
        if any(one.kind is ObjectKind.EXCHANGE for one in deviations):
            self._verify_bindings()  # deleted together with their exchange

    def _is_of_retry_queue(self, item: Queue | QueueBinding) -> bool:
        name: QueueName = item.name if isinstance(item, Queue) else item.queue
        return self._names.delay_of_retry_queue(name) is not None

    def _note_repair(self, one: Deviation) -> None:
        self._repairs += 1
        self._last_repair = f"{one.kind} {one.name}"
        self._metrics.topology_repairs.labels(object=one.kind.value).inc()
        self._log.warning("pool object repaired", object=one.kind.value, name=one.name, problem=one.detail)

    def _note_conflicts(self, conflicts: list[Deviation]) -> None:
        for one in conflicts:
            if one not in self._conflicts:
                self._log.error(
                    "pool object cannot be repaired", object=one.kind.value, name=one.name, problem=one.detail
                )
        self._conflicts = conflicts

    def finding(self) -> Finding:
        """The finding for `status`: what cannot be repaired, or what was repaired in this term."""
        if self._conflicts:
            first, more = self._conflicts[0], len(self._conflicts) - 1
            others = f", and {more} more" if more else ""
            return Finding(COMPONENT, False, f"{first}{others}; see `osrdyne doctor`")
        if self._failure is not None:
            return Finding(COMPONENT, False, f"not compared: {self._failure}", fatal=False)
        detail = f"as declared, compared {self._clock.monotonic() - self._compared_at:.0f} s ago"
        if self._repairs:
            detail += f"; repaired in this term: {self._repairs}, the last: {self._last_repair}"
        return Finding(COMPONENT, True, detail)
