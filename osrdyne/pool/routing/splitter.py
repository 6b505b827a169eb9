"""The active splitter of a managed pool in one term.

A change applies to requests that arrive after it: those that were accepted before stay with their group. The sequence
of static rules begins anew with each change and each term.
"""

from __future__ import annotations

from osrdyne.ingress.splitter.manifest import SplitterManifest, load_splitter_json
from osrdyne.ingress.splitter.rules import Splitter
from osrdyne.pool.context import TermContext
from osrdyne.pool.routing.active_manifest import ActiveManifest
from osrdyne.pool.routing.manifest_store import ManifestKind, ManifestStore
from osrdyne.pool.state.pins import Parameters


class ActiveSplitter(ActiveManifest[SplitterManifest]):
    """The active splitter; `splitter` is None if there are no rules."""

    def __init__(self, context: TermContext, parameters: Parameters) -> None:
        pool = context.names.pool
        super().__init__(
            context, ManifestStore(parameters, pool=pool, kind=ManifestKind.SPLITTER, load=load_splitter_json)
        )
        self.splitter: Splitter | None = None

    async def _use(self, manifest: SplitterManifest | None) -> None:
        self.splitter = Splitter(manifest.rules) if manifest is not None and manifest.rules else None
