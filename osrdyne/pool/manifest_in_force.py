"""The manifest of one kind that is in force in one term: read when it begins, followed, changed through the API.

What is in force changes at once, for requests that come after it. Each kind says what that means for it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Generic

from osrdyne.aio.clock import Clock
from osrdyne.errors import BrokerError, PoolConflictError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.manifest_store import D, KeptManifest, ManifestChange, ManifestStore

FOLLOW_INTERVAL = 30.0
"""How often what is in force is compared with what is kept, seconds."""
NOT_MANAGED = "Routes and splitters need a managed pool: set pool.kind to managed, and restart the daemon."


class ManifestInForce(ABC, Generic[D]):
    """The manifest of one kind; a direct pool has none."""

    def __init__(self, store: ManifestStore[D], *, managed: bool, clock: Clock) -> None:
        self._store = store
        self._managed = managed
        self._clock = clock
        self._changing = asyncio.Lock()
        self._kept: KeptManifest | None = None
        self._log: Logger = get_logger(store.kind.value)

    @abstractmethod
    async def _use(self, manifest: D) -> None:
        """Decide by this manifest from now on. Raises `BrokerError`: then the former one stays."""

    async def load(self) -> None:
        """At the beginning of a term: put in force what is kept."""
        if self._managed:
            kept = await self._store.current()
            if kept is not None:
                await self._put_in_force(kept, self._store.load(kept.manifest))

    async def run(self) -> None:
        """Follow what is kept, for ever."""
        while True:
            await self._clock.sleep(FOLLOW_INTERVAL)
            try:
                await self.follow()
            except BrokerError as error:
                self._log.warning("manifest cannot be compared with the one kept", error=str(error))

    async def follow(self) -> None:
        """Put in force what is kept, if that is something else: a leader may write while it loses the lead."""
        if not self._managed:
            return
        async with self._changing:
            kept = await self._store.current()
            if kept is not None and kept != self._kept:
                self._log.warning(
                    "another manifest is kept than was in force", version=kept.version, author=kept.author
                )
                await self._put_in_force(kept, self._store.load(kept.manifest))

    async def change(self, manifest: D, *, author: str) -> ManifestChange:
        """Keep a manifest and put it in force. Raises `PoolConflictError` in a direct pool, `BrokerError`."""
        self.require_managed()
        async with self._changing:
            return await self._change(manifest, author=author)

    async def _change(self, manifest: D, *, author: str) -> ManifestChange:
        kept = await self._store.save(manifest, author=author, at=self._clock.time())
        await self._put_in_force(kept, manifest)
        return ManifestChange(kept, manifest.warnings)

    async def change_text(self, text: str, *, author: str) -> ManifestChange:
        """As `change`. Raises `InvalidDocumentError` with every error of the text."""
        return await self.change(self._store.load(text), author=author)

    async def restore(self, version: int, *, author: str) -> ManifestChange:
        """Put an earlier version in force again. Raises `PoolConflictError` when it is not kept."""
        for kept in await self.history():
            if kept.version == version:
                return await self.change_text(kept.manifest, author=author)
        raise PoolConflictError(
            f"There is no version {version}: `osrdyne {self._store.kind} history` shows those that are kept."
        )

    async def history(self) -> list[KeptManifest]:
        """Every version that is kept, the newest first. Raises `PoolConflictError` in a direct pool."""
        self.require_managed()
        return await self._store.history()

    def require_managed(self) -> None:
        """Raises `PoolConflictError` in a direct pool."""
        if not self._managed:
            raise PoolConflictError(NOT_MANAGED)

    async def _put_in_force(self, kept: KeptManifest, manifest: D) -> None:
        await self._use(manifest)
        self._kept = kept
        self._log.info("manifest in force", version=kept.version, author=kept.author)
