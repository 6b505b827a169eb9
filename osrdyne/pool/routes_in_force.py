"""The routes of a managed pool in one term, how they change, and what changes with them.

Built by the term. The manifest is read when the term begins, and changed through the API. A change holds at once for
requests that come after it; those that were accepted before keep their class and deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from osrdyne.aio.clock import Clock
from osrdyne.broker.layout import QueueLayout
from osrdyne.broker.topology import Topology
from osrdyne.errors import PoolConflictError
from osrdyne.ingress.explain import Explanation, explain
from osrdyne.ingress.manifest import Manifest
from osrdyne.ingress.problems import Problem
from osrdyne.ingress.requests import Arrival
from osrdyne.ingress.table import RouteTable
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.classes import PriorityClasses
from osrdyne.pool.route_store import KeptManifest, RouteStore

NOT_MANAGED = "Routes need a managed pool: set pool.kind to managed, and restart the daemon."


@dataclass(frozen=True, slots=True)
class RouteChange:
    """What a change of the manifest did."""

    kept: KeptManifest
    added: tuple[int, ...]
    removed: tuple[int, ...]
    warnings: tuple[Problem, ...] = ()


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
        self.table: RouteTable | None = None
        self._log: Logger = get_logger("routes")

    async def load(self) -> None:
        """At the beginning of a term, before any group is looked at: the manifest in force and its exchanges."""
        if not self._layout.managed:
            return
        kept = await self._store.current()
        if kept is not None:
            manifest = kept.load()
            self.table = RouteTable(manifest)
            self._layout.use(manifest.priorities)
            self._log.info("routes loaded", version=kept.version, routes=len(manifest.routes))
        await self._declare(self._layout.exchanges)

    async def change(self, manifest: Manifest, *, author: str) -> RouteChange:
        """Keep a manifest and put it in force. Raises `PoolConflictError` in a direct pool, `BrokerError`."""
        if not self._layout.managed:
            raise PoolConflictError(NOT_MANAGED)
        async with self._changing:
            before = self._layout.used
            await self._declare(self._layout.exchanges_for(manifest.priorities))
            kept = await self._store.save(manifest, author=author, at=self._clock.time())
            if manifest.priorities != before:
                self.classes.use(manifest.priorities)
            self.table = RouteTable(manifest)
        self._log.info("routes changed", version=kept.version, author=author, routes=len(manifest.routes))
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
