"""The active manifest of one kind in one term: loaded when the term begins, followed, and changed through the API.

A change takes effect at once, for requests that arrive after it. Each kind defines what that means for it: routes in
`routes`, profiles in `profiles`, the splitter here.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import ClassVar, Generic

from osrdyne.errors import BrokerError, PoolConflictError, VersionConflictError
from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.ingress.splitter.manifest import SplitterManifest, load_splitter_json
from osrdyne.ingress.splitter.rules import Splitter
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.routing.manifest_store import D, KeptManifest, ManifestChange, ManifestKind, ManifestStore
from osrdyne.pool.state.groups.pins import Parameters

FOLLOW_INTERVAL = 30.0  # Seconds between two comparisons of the active manifest with the stored one.
NOT_MANAGED = "Routes and splitters need a managed pool: set pool.kind to managed, and restart the daemon."


class ActiveManifest(ABC, Generic[D]):
    """The active manifest of one kind; a direct pool has none, unless the kind does not need a managed pool.

    A change may name the version that it expects to be active, 0 for none. If another version is active, it raises
    `VersionConflictError`.
    """

    needs_managed: ClassVar[bool] = True

    def __init__(self, context: TermContext, store: ManifestStore[D]) -> None:
        self._store = store
        self._managed = context.settings.pool.is_managed or not self.needs_managed
        self._clock = context.clock
        self._changing = asyncio.Lock()
        self._kept: KeptManifest | None = None
        self._log: Logger = get_logger(store.kind.value)

    @abstractmethod
    async def _use(self, manifest: D | None) -> None:
        """Apply this manifest, or none, from now on. Raises `BrokerError`: then the former one stays active."""

    async def load(self) -> None:
        """Activate the stored manifest at the beginning of a term."""
        if self._managed:
            kept = await self._store.current()
            if kept is not None:
                await self._activate(kept, await self._store.load_kept(kept))

    async def run(self) -> None:
        """Follow the stored manifest. Runs until cancelled."""
        while True:
            await self._clock.sleep(FOLLOW_INTERVAL)
            try:
                await self.follow()
            except BrokerError as error:
                self._log.warning("manifest comparison failed", error=str(error))

    async def follow(self) -> None:
        """Activate the stored manifest if it differs: an earlier leader may have stored one while it lost the token."""
        if not self._managed:
            return
        async with self._changing:
            # Never during a change: between store and activation the stored manifest differs from the active one.
            kept = await self._store.current()
            if kept is not None and kept != self._kept:
                self._log.warning(
                    "stored manifest differs from the active one", version=kept.version, author=kept.author
                )
                await self._activate(kept, await self._store.load_kept(kept))

    @property
    def name(self) -> str:
        """The name of the parameter that stores the manifest."""
        return self._store.name

    async def is_missing(self) -> bool:
        """Whether a manifest is active and RabbitMQ has none."""
        return self._kept is not None and await self._store.is_missing()

    async def store_again(self) -> None:
        """Store the active manifest again, unless another one was stored meanwhile."""
        async with self._changing:
            if self._kept is not None and await self._store.is_missing():
                await self._store.store_again(self._kept)

    async def change(self, manifest: D | None, *, author: str, expected: int | None = None) -> ManifestChange:
        """Store a manifest and activate it; None: no manifest from now on.

        Raises `PoolConflictError` in a direct pool, `VersionConflictError`, `BrokerError`.
        """
        self.require_managed()
        async with self._changing:
            await self._require_version(expected)
            # Under the lock: of two changes that expect the same version, the second one is refused.
            return await self._change(manifest, author=author)

    async def _change(self, manifest: D | None, *, author: str) -> ManifestChange:
        # Stored before it is active. Crash in between: the next leader activates what is stored.
        kept = await self._store.save(manifest, author=author, at=self._clock.time())
        await self._activate(kept, manifest)
        return ManifestChange(kept, () if manifest is None else manifest.warnings)

    async def change_text(self, text: str, *, author: str, expected: int | None = None) -> ManifestChange:
        """Change to the manifest in a text. Raises `InvalidDocumentError` with every error of the text."""
        self.require_managed()
        await self._require_version(expected)  # before loading the text, and again afterwards
        return await self.change(await self._store.load(text), author=author, expected=expected)

    async def clear(self, *, author: str, expected: int | None = None) -> ManifestChange:
        """Change to no manifest. Raises `PoolConflictError` if there is none."""
        self.require_managed()
        current = await self._store.current()
        if current is None or current.stored is None:
            raise PoolConflictError("No manifest is active.")
        return await self.change(None, author=author, expected=expected)

    async def restore(self, version: int, *, author: str, expected: int | None = None) -> ManifestChange:
        """Activate an earlier version again. Raises `PoolConflictError` if it is not stored."""
        for kept in await self.history():
            if kept.version == version:
                try:
                    manifest = await self._store.load_kept(kept)
                except InvalidDocumentError as error:
                    raise PoolConflictError(f"The version {version} cannot be read any more: {error}") from error
                return await self.change(manifest, author=author, expected=expected)
        raise PoolConflictError(
            f"There is no version {version}: `{self._store.kind.command} history` shows those that are kept."
        )

    async def current(self) -> KeptManifest | None:
        """The active version. Raises `PoolConflictError` in a direct pool."""
        self.require_managed()
        return await self._store.current()

    async def history(self) -> list[KeptManifest]:
        """Every stored version, the newest first. Raises `PoolConflictError` in a direct pool."""
        self.require_managed()
        return await self._store.history()

    def require_managed(self) -> None:
        """Raise `PoolConflictError` in a direct pool."""
        if not self._managed:
            raise PoolConflictError(NOT_MANAGED)

    async def _require_version(self, expected: int | None) -> None:
        if expected is None:
            return
        current = await self._store.current()
        version = 0 if current is None else current.version
        if version != expected:
            by = f"version {version} of {current.author}" if current is not None else "no version"
            raise VersionConflictError(
                f"The change expects {f'version {expected}' if expected else 'no version'} to be active, but {by} is.",
                version=version,
            )

    async def _activate(self, kept: KeptManifest, manifest: D | None) -> None:
        await self._use(manifest)
        # Only after it is in use: if that fails, `follow` sees a difference and tries again.
        self._kept = kept
        self._log.info("manifest activated", version=kept.version, author=kept.author, empty=manifest is None)


class ActiveSplitter(ActiveManifest[SplitterManifest]):
    """The active splitter; `splitter` is None if there are no rules.

    A change applies to requests that arrive after it: those accepted before stay with their group. The sequence of
    static rules begins again with each change and each term.
    """

    def __init__(self, context: TermContext, parameters: Parameters) -> None:
        pool = context.names.pool
        super().__init__(
            context, ManifestStore(parameters, pool=pool, kind=ManifestKind.SPLITTER, load=load_splitter_json)
        )
        self.splitter: Splitter | None = None

    async def _use(self, manifest: SplitterManifest | None) -> None:
        self.splitter = Splitter(manifest.rules) if manifest is not None and manifest.rules else None
