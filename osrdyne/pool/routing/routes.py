"""The active routes of a managed pool in one term.

Requests that were accepted before a change keep their priority level and deadline.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from osrdyne.aio.tasks import SMALL, off_loop
from osrdyne.broker.topology.comparison import expected_topology
from osrdyne.broker.topology.declarations import Topology
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.errors import BrokerError
from osrdyne.ingress.acceptance import TtlLimits, longest_ttl, warn_of_capped_ttls
from osrdyne.ingress.documents.problems import InvalidDocumentError, Problem
from osrdyne.ingress.routes.manifest import Manifest, load_manifest_json
from osrdyne.ingress.routes.retries import different_delays
from osrdyne.ingress.routes.table import RouteTable
from osrdyne.pool.context import TermContext
from osrdyne.pool.routing.active_manifest import ActiveManifest
from osrdyne.pool.routing.manifest_store import ManifestChange, ManifestKind, ManifestStore
from osrdyne.pool.routing.priorities import PriorityLevels
from osrdyne.pool.routing.retries import RetryQueuesLoop
from osrdyne.pool.state.groups.pins import Parameters
from osrdyne.protocol.names import Key, QueueId


class RouteStore(ManifestStore[Manifest]):
    """The route manifests of one pool."""

    def __init__(self, parameters: Parameters, *, pool: str) -> None:
        super().__init__(parameters, pool=pool, kind=ManifestKind.ROUTES, load=load_manifest_json)


_NO_ROUTES = Manifest()


@dataclass(frozen=True, slots=True)
class RouteChange(ManifestChange):
    """The result of a change of the routes: also the priorities added and removed. `pending`: requests of priorities
    that no route uses any more, which wait in the queues of their groups and will be served."""

    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    pending: Mapping[int, int] = field(default_factory=dict)


class ActiveRoutes(ActiveManifest[Manifest]):
    """The active routes; a direct pool has none. `declare` declares exchanges, `count_ready` counts the waiting
    requests of a priority level, `apply_policy` sets the maximum age of requests in their queues, in seconds."""

    def __init__(
        self,
        context: TermContext,
        *,
        layout: QueueLayout,
        levels: PriorityLevels,
        retries: RetryQueuesLoop,
        store: RouteStore,
        declare: Callable[[Topology], Awaitable[None]],
        count_ready: Callable[[Key, int], Awaitable[int]],
        apply_policy: Callable[[float], Awaitable[None]],
    ) -> None:
        super().__init__(context, store)
        requests = context.settings.requests
        self._layout = layout
        self.levels = levels
        self._retries = retries
        self.ttl_limits = TtlLimits(requests.ttl, requests.longest_ttl)
        # Maximum lifetime in seconds of any request that was accepted in this term, or is accepted by the active
        # routes. It never falls within a term, because requests of former routes may still wait.
        self.longest_ttl = self.ttl_limits.default
        self._log_name = context.settings.telemetry.name
        self._apply_policy = apply_policy
        self._declare = declare
        self._count_ready = count_ready
        self._metrics = context.metrics
        self.table: RouteTable | None = None
        # The routes whose requests are currently not retried, with the reason.
        self.retries_off: Mapping[str, str] = {}
        self._manifest: Manifest | None = None
        self._names: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """The names of the active routes."""
        return self._names

    @property
    def retrying(self) -> Mapping[int, int]:
        """Requests that wait for their next attempt, by delay in milliseconds; up to a minute old."""
        return self._retries.waiting

    @property
    def longest_wait(self) -> float:
        """Maximum seconds that an accepted request may wait for its next attempt, at most its lifetime. 0 if none
        waits."""
        in_use = self.table is not None and bool(self.table.manifest.retry_delays)
        return self.longest_ttl if in_use or any(self.retrying.values()) else 0.0

    def note_retried(self, key: Key, priority: int | None, route: str | None) -> None:
        """Record that a worker has sent a request of this group, level and route to a retry queue."""
        routes = () if self._manifest is None else self._manifest.routes
        delays_ms = different_delays(one.retry for one in routes if one.name == route) or {*self.retrying}
        delay = min(max(delays_ms, default=math.inf) / 1000, self.longest_ttl)  # it waits for at most its lifetime
        self._retries.returned.note_sent((key, priority), at=self._clock.monotonic(), delay=delay)

    def may_have_returned(self, queue: QueueId, since: float) -> bool:
        """Whether a request may have come back to this queue since (monotonic) after its wait for another attempt."""
        return self.longest_wait > 0 and self._retries.returned.may_have_come(queue, since=since)

    def expected_topology(self) -> Topology:
        """The objects that have to be declared for the pool and the active routes, except request queues."""
        delays_ms, levels = self._retries.declared
        return expected_topology(
            self._layout.names, managed=self._layout.managed, priorities=levels, delays_ms=delays_ms
        )

    async def declare_retry_queues(self) -> None:
        """Declare the retry queues again, because one was found missing."""
        await self._retries.declare_again()

    async def load(self) -> None:
        """Activate the stored manifest and declare its exchanges, before any group is handled."""
        if self._layout.managed:
            await self._declare(self._layout.exchanges)
            await self._retries.use((), ())
        else:
            await self._retries.use_none()
        await super().load()

    async def run(self) -> None:
        """Send workers their queues, maintain the retry queues, and follow the stored manifest. Runs until
        cancelled. A direct pool may have queues of both kinds from before."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.levels.run(), name="priority levels")
            group.create_task(self._retries.run(self._update_retries), name="retry queues")
            if self._layout.managed:
                await super().run()

    async def require_level(self, priority: int | None) -> None:
        """Keep the level of a returning request in use. A worker may name a level that no route has used since
        RabbitMQ was set up. Raises `BrokerConflictError`."""
        if priority is not None and priority not in self._layout.used:
            await self._declare(self._layout.exchanges_for((priority,)))
        self.levels.require(priority)

    async def _require_ttl(self, manifest: Manifest) -> None:
        """Have queues keep requests for as long as these routes allow, before the first such request is accepted."""
        longest = longest_ttl(manifest, self.ttl_limits)
        if longest > self.longest_ttl:
            # Before the routes are active: a queue with the shorter TTL would end the first such request too early.
            await self._apply_policy(longest)
            self.longest_ttl = self._retries.needed_for = longest

    async def _use(self, manifest: Manifest | None) -> None:
        routes = _NO_ROUTES if manifest is None else manifest
        await self._require_ttl(routes)
        # Exchanges before levels: a publish to a missing one closes the publishing channel and ends the term.
        await self._declare(self._layout.exchanges_for(routes.priorities))
        await self._retries.use(routes.retry_delays, routes.priorities)
        # Before the table is set: a request by the new routes waits for its group to be bound with the new levels.
        self.levels.use(routes.priorities)
        if manifest is None:
            self._manifest, self.retries_off, self.table = None, {}, None
            self._names = frozenset()
        else:
            # Building the table is most of the work for many routes; it is repeated only if a retry queue was refused
            # meanwhile.
            off = _retries_off(manifest, self._retries.refused)
            # Requests are routed by the former table until the new one is built.
            table = await off_loop(manifest.size * SMALL // 100, RouteTable, manifest.without_retries(off))
            self._decide_by(manifest, table if off == _retries_off(manifest, self._retries.refused) else None)
        # Only names of the manifest become labels: a worker could report any text as a route.
        self._metrics.know_routes(route.name for route in routes.routes)

    def _decide_by(self, manifest: Manifest, table: RouteTable | None = None) -> None:
        """Decide by these routes, without the retries whose queue was refused."""
        off = _retries_off(manifest, self._retries.refused)
        for name in off.keys() - self.retries_off.keys():
            self._log.error("retries of a route are off", route=name, reason=off[name])
        for name in self.retries_off.keys() - off.keys():
            self._log.info("retries of a route are on again", route=name)
        self._manifest, self.retries_off = manifest, off
        self._names = frozenset(route.name for route in manifest.routes)
        self.table = RouteTable(manifest.without_retries(off)) if table is None else table

    def _update_retries(self) -> None:
        """Rebuild the table if the refused retry queues have changed."""
        if self._manifest is not None and _retries_off(self._manifest, self._retries.refused) != self.retries_off:
            self._decide_by(self._manifest)

    async def _change(self, manifest: Manifest | None, *, author: str) -> RouteChange:
        before = self.levels.of_routes
        routes = _NO_ROUTES if manifest is None else manifest
        self._refuse_other_logs(routes)
        await self._require_ttl(routes)
        # What may be refused comes first: a stored manifest that cannot be activated would end each following term.
        await self._declare(self._layout.exchanges_for(routes.priorities))
        await self._retries.declare(routes.retry_delays, routes.priorities)
        change = await super()._change(manifest, author=author)
        off = (Problem(f"not retried for now. {why}", path=f"routes.{name}") for name, why in self.retries_off.items())
        return RouteChange(
            change.kept,
            (*change.warnings, *warn_of_capped_ttls(routes, self.ttl_limits), *off),
            added=tuple(sorted(routes.priorities - before)),
            removed=tuple(sorted(before - routes.priorities)),
            pending=await self._count_pending(),
        )

    def _refuse_other_logs(self, routes: Manifest) -> None:
        """Raises `InvalidDocumentError` for routes to a log that the pool does not have: their requests would be
        refused."""
        known = "has no log" if self._log_name is None else f"has the log {self._log_name!r}"
        if others := routes.routes_to_other_logs(self._log_name):
            raise InvalidDocumentError(
                [
                    Problem(
                        f"the pool {known}; write its name, or change telemetry.name and restart the daemon",
                        path=f"routes.{one.name}.route",
                    )
                    for one in others
                ]
            )

    async def _count_pending(self) -> dict[int, int]:
        pending: Counter[int] = Counter()
        for key, priority in self._layout.unused():
            try:
                pending[priority] += await self._count_ready(key, priority)
            except BrokerError as error:  # the change is made; a missing count does not make it fail
                self._log.warning("pending requests not counted", key=key, priority=priority, error=str(error))
        return {priority: count for priority, count in sorted(pending.items()) if count}


def _retries_off(manifest: Manifest, refused: Mapping[int, str]) -> dict[str, str]:
    """The routes that need a refused delay, with the reason."""
    return {
        route.name: refused[min(delays)]
        for route in manifest.routes
        if (delays := refused.keys() & different_delays([route.retry]))
    }
