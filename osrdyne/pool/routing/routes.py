"""The routes of a managed pool in one term, how they change, and what changes with them.

Built by the term. Requests that were accepted before a change keep their class and deadline.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from osrdyne.aio.offload import SMALL, off_loop
from osrdyne.broker.topology.comparison import expected_topology
from osrdyne.broker.topology.declarations import Topology
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.errors import BrokerError
from osrdyne.ingress.acceptance import TtlLimits, longest_ttl, warn_of_capped_ttls
from osrdyne.ingress.documents.problems import Problem
from osrdyne.ingress.routes.manifest import Manifest, load_manifest_json
from osrdyne.ingress.routes.retries import different_delays
from osrdyne.ingress.routes.table import RouteTable
from osrdyne.pool.context import TermContext
from osrdyne.pool.routing.active_manifest import ActiveManifest
from osrdyne.pool.routing.manifest_store import ManifestChange, ManifestKind, ManifestStore
from osrdyne.pool.routing.priorities import PriorityLevels
from osrdyne.pool.routing.retries import RetryQueuesLoop
from osrdyne.pool.state.pins import Parameters
from osrdyne.protocol.names import Key, QueueId


class RouteStore(ManifestStore[Manifest]):
    """The route manifests of one pool."""

    def __init__(self, parameters: Parameters, *, pool: str) -> None:
        super().__init__(parameters, pool=pool, kind=ManifestKind.ROUTES, load=load_manifest_json)


_NO_ROUTES = Manifest()


@dataclass(frozen=True, slots=True)
class RouteChange(ManifestChange):
    """What a change of the routes did: also which priorities came and went. `pending`: requests of priorities that no
    route uses, that wait in the queues of their groups and will be served."""

    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    pending: Mapping[int, int] = field(default_factory=dict)


class ActiveRoutes(ActiveManifest[Manifest]):
    """The routes of one term; a direct pool has none. `declare` puts exchanges on the broker, `count_ready` asks it how
    many requests wait in a queue, `keep_for` sets for how many seconds request queues keep a request."""

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
        self.longest_ttl = self.ttl_limits.default
        """Seconds that no request outlives which was accepted in this term, or is accepted by the active routes. It
        never falls in a term: requests of former routes may still wait."""
        self._apply_policy = apply_policy
        self._declare = declare
        self._count_ready = count_ready
        self._metrics = context.metrics
        self.table: RouteTable | None = None
        self.retries_off: Mapping[str, str] = {}
        """The routes whose requests are not tried again although they should be, and why."""
        self._manifest: Manifest | None = None

    @property
    def retrying(self) -> Mapping[int, int]:
        """How many requests wait for their next attempt, by delay in milliseconds; up to a minute old."""
        return self._retries.waiting

    @property
    def longest_wait(self) -> float:
        """Seconds for which an accepted request may wait for its next attempt: no longer than it may live. 0: none
        waits."""
        in_use = self.table is not None and bool(self.table.manifest.retry_delays)
        return self.longest_ttl if in_use or any(self.retrying.values()) else 0.0

    def note_retried(self, key: Key, priority: int | None, route: str | None) -> None:
        """A worker has sent a request of this group, class and route to wait for its next attempt."""
        routes = () if self._manifest is None else self._manifest.routes
        delays_ms = different_delays(one.retry for one in routes if one.name == route) or {*self.retrying}
        delay = min(
            max(delays_ms, default=math.inf) / 1000, self.longest_ttl
        )  # it waits for no longer than it may live
        self._retries.returned.note_sent((key, priority), at=self._clock.monotonic(), delay=delay)

    def may_have_returned(self, queue: QueueId, since: float) -> bool:
        """Whether a request may have come back to this queue since (monotonic) after its wait for another attempt."""
        return self.longest_wait > 0 and self._retries.returned.may_have_come(queue, since=since)

    def expected_topology(self) -> Topology:
        """What has to be declared for the pool and the routes in force, besides request queues."""
        delays_ms, classes = self._retries.declared
        return expected_topology(
            self._layout.names, managed=self._layout.managed, priorities=classes, delays_ms=delays_ms
        )

    async def declare_waits(self) -> None:
        """Declare the queues where requests wait for their next attempt again: one was found missing."""
        await self._retries.declare_again()

    async def load(self) -> None:
        """Before any group is looked at: the manifest in force and its exchanges."""
        if self._layout.managed:
            await self._declare(self._layout.exchanges)
            await self._retries.use((), ())
        else:
            await self._retries.use_none()
        await super().load()

    async def run(self) -> None:
        """Tell workers their queues, look after wait queues, and follow what is kept, for ever; a direct pool may have
        queues of both kinds from before."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.levels.run(), name="queues for workers")
            group.create_task(self._retries.run(self._look_at_retries), name="unused wait queues")
            if self._layout.managed:
                await super().run()

    async def require_level(self, priority: int | None) -> None:
        """A request of this class is under way, which perhaps no route has used in the life of the broker: a worker may
        name any. Raises `BrokerConflictError`."""
        if priority is not None and priority not in self._layout.used:
            await self._declare(self._layout.exchanges_for((priority,)))
        self.levels.require(priority)

    async def _require_ttl(self, manifest: Manifest) -> None:
        """Let queues keep requests for as long as these routes allow, before the first such request is accepted."""
        longest = longest_ttl(manifest, self.ttl_limits)
        if longest > self.longest_ttl:
            await self._apply_policy(longest)
            self.longest_ttl = self._retries.needed_for = longest

    async def _use(self, manifest: Manifest | None) -> None:
        routes = _NO_ROUTES if manifest is None else manifest
        await self._require_ttl(routes)
        await self._declare(self._layout.exchanges_for(routes.priorities))
        await self._retries.use(routes.retry_delays, routes.priorities)
        self.levels.use(routes.priorities)
        if manifest is None:
            self._manifest, self.retries_off, self.table = None, {}, None
        else:
            # Most of the work on many routes; it is done again only where a wait queue was refused meanwhile.
            off = _retries_off(manifest, self._retries.refused)
            table = await off_loop(manifest.size * SMALL // 100, RouteTable, manifest.without_retries(off))
            self._decide_by(manifest, table if off == _retries_off(manifest, self._retries.refused) else None)
        self._metrics.know_routes(route.name for route in routes.routes)

    def _decide_by(self, manifest: Manifest, table: RouteTable | None = None) -> None:
        """Without the retries for which there is no queue."""
        off = _retries_off(manifest, self._retries.refused)
        for name in off.keys() - self.retries_off.keys():
            self._log.error("requests of a route are not tried again", route=name, reason=off[name])
        for name in self.retries_off.keys() - off.keys():
            self._log.info("requests of a route are tried again, or need not be", route=name)
        self._manifest, self.retries_off = manifest, off
        self.table = RouteTable(manifest.without_retries(off)) if table is None else table

    def _look_at_retries(self) -> None:
        """What wait queues there are may have changed."""
        if self._manifest is not None and _retries_off(self._manifest, self._retries.refused) != self.retries_off:
            self._decide_by(self._manifest)

    async def _change(self, manifest: Manifest | None, *, author: str) -> RouteChange:
        before = self.levels.of_routes
        routes = _NO_ROUTES if manifest is None else manifest
        await self._require_ttl(routes)
        # First what may be refused: a manifest that is kept and cannot be had would end each term that follows.
        await self._declare(self._layout.exchanges_for(routes.priorities))
        await self._retries.declare(routes.retry_delays, routes.priorities)
        change = await super()._change(manifest, author=author)
        off = (
            Problem(f"not tried again for now. {why}", path=f"routes.{name}") for name, why in self.retries_off.items()
        )
        return RouteChange(
            change.kept,
            (*change.warnings, *warn_of_capped_ttls(routes, self.ttl_limits), *off),
            added=tuple(sorted(routes.priorities - before)),
            removed=tuple(sorted(before - routes.priorities)),
            pending=await self._count_pending(),
        )

    async def _count_pending(self) -> dict[int, int]:
        pending: Counter[int] = Counter()
        for key, priority in self._layout.unused():
            try:
                pending[priority] += await self._count_ready(key, priority)
            except BrokerError as error:  # the change is made; what cannot be told of it is no reason to say it failed
                self._log.warning("requests cannot be counted", key=key, priority=priority, error=str(error))
        return {priority: count for priority, count in sorted(pending.items()) if count}


def _retries_off(manifest: Manifest, refused: Mapping[int, str]) -> dict[str, str]:
    """The routes that need a delay that is refused, and why it is."""
    return {
        route.name: refused[min(delays)]
        for route in manifest.routes
        if (delays := refused.keys() & different_delays([route.retry]))
    }
