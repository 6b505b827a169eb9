"""The routes of a managed pool in one term, how they change, and what changes with them.

Built by the term. The manifest is read when the term begins, and changed through the API. A change holds at once for
requests that come after it; those that were accepted before keep their class and deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from osrdyne.aio.clock import Clock
from osrdyne.broker.layout import QueueLayout
from osrdyne.broker.topology import Topology
from osrdyne.errors import BrokerError, PoolConflictError
from osrdyne.ingress.explain import Explanation, explain
from osrdyne.ingress.manifest import Manifest
from osrdyne.ingress.requests import Arrival
from osrdyne.ingress.table import RouteTable
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.classes import PriorityClasses
from osrdyne.pool.route_store import KeptManifest, RouteChange, RouteStore

FOLLOW_INTERVAL = 30.0
"""How often the routes in force are compared with those that are kept, seconds."""
NOT_MANAGED = "Routes need a managed pool: set pool.kind to managed, and restart the daemon."


class RoutesInForce:
    """The routes of one term; a direct pool has none. `declare` puts exchanges on the broker, `pool_ttl` in seconds is
    the pool's own limit."""

    def __init__(
        self,
        *,
        layout: QueueLayout,
        classes: PriorityClasses,
        store: RouteStore,
        declare: Callable[[Topology], Awaitable[None]],
        pool_ttl: float,
        clock: Clock,
    ) -> None:
        self._layout = layout
        self.classes = classes
        self._store = store
        self.pool_ttl = pool_ttl
        self._declare = declare
        self._clock = clock
        self._changing = asyncio.Lock()
        self._kept: KeptManifest | None = None
        self.table: RouteTable | None = None
        self._log: Logger = get_logger("routes")

    async def load(self) -> None:
        """At the beginning of a term, before any group is looked at: the manifest in force and its exchanges."""
        if not self._layout.managed:
            return
        await self._declare(self._layout.exchanges)
        kept = await self._store.current()
        if kept is not None:
            await self._put_in_force(kept, kept.load())

    async def run(self) -> None:
        """Tell workers their queues, and follow what is kept, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.classes.run(), name="queues for workers")
            while True:
                await self._clock.sleep(FOLLOW_INTERVAL)
                try:
                    await self.follow()
                except BrokerError as error:
                    self._log.warning("routes cannot be compared with those kept", error=str(error))

    async def follow(self) -> None:
        """Put in force what is kept, if that is something else: a leader may write while it loses the lead."""
        async with self._changing:
            kept = await self._store.current()
            if kept is not None and kept != self._kept:
                self._log.warning("other routes are kept than were in force", version=kept.version, author=kept.author)
                await self._put_in_force(kept, kept.load())

    async def _put_in_force(self, kept: KeptManifest, manifest: Manifest) -> None:
        await self._declare(self._layout.exchanges_for(manifest.priorities))
        if manifest.priorities != self._layout.used:
            self.classes.use(manifest.priorities)
        self._kept, self.table = kept, RouteTable(manifest)
        self._log.info("routes in force", version=kept.version, routes=len(manifest.routes))

    async def change(self, manifest: Manifest, *, author: str) -> RouteChange:
        """Keep a manifest and put it in force. Raises `PoolConflictError` in a direct pool, `BrokerError`."""
        if not self._layout.managed:
            raise PoolConflictError(NOT_MANAGED)
        async with self._changing:
            before = self._layout.used
            kept = await self._store.save(manifest, author=author, at=self._clock.time())
            await self._put_in_force(kept, manifest)
        return RouteChange(
            kept,
            added=tuple(sorted(manifest.priorities - before)),
            removed=tuple(sorted(before - manifest.priorities)),
            warnings=manifest.warnings,
        )

    async def restore(self, version: int, *, author: str) -> RouteChange:
        """Put an earlier version in force again. Raises `PoolConflictError` when it is not kept."""
        for kept in await self.history():
            if kept.version == version:
                return await self.change(kept.load(), author=author)
        raise PoolConflictError(f"There is no version {version}: `osrdyne routes history` shows those that are kept.")

    def explain(self, arrival: Arrival) -> Explanation:
        """What would happen to a request now. Raises `PoolConflictError` in a direct pool."""
        if not self._layout.managed:
            raise PoolConflictError(NOT_MANAGED)
        return explain(arrival, self.table, names=self._layout.names, pool_ttl=self.pool_ttl)

    async def history(self) -> list[KeptManifest]:
        """Every version that is kept, the newest first. Raises `PoolConflictError` in a direct pool."""
        if not self._layout.managed:
            raise PoolConflictError(NOT_MANAGED)
        return await self._store.history()
