"""What the API asks of the daemon about the manifests of a managed pool, and what they make of a request."""

from __future__ import annotations

from typing import Protocol

from osrdyne.ingress.explain import Explanation
from osrdyne.ingress.requests import Arrival
from osrdyne.pool.routing.manifest_store import KeptManifest, ManifestChange, ManifestKind


class ManifestInspector(Protocol):
    """Every method raises `LeadershipLostError` while this daemon does not lead, and `PoolConflictError` in a direct
    pool. `expected` is the version that a change expects to be in force, 0 for none; where another is, it raises
    `VersionConflictError`."""

    @property
    def pool(self) -> str: ...

    async def current_manifest(self, kind: ManifestKind) -> KeptManifest | None:
        """The version in force; None when there has never been one."""
        ...

    async def manifests(self, kind: ManifestKind) -> list[KeptManifest]:
        """Every version that is kept, the newest first, which is in force; empty when there has never been one."""
        ...

    async def change_manifest(
        self, kind: ManifestKind, text: str, *, author: str, expected: int | None = None
    ) -> ManifestChange:
        """Put the manifest of a text in force. Raises `InvalidDocumentError` with every error of it."""
        ...

    async def restore_manifest(
        self, kind: ManifestKind, version: int, *, author: str, expected: int | None = None
    ) -> ManifestChange:
        """Put an earlier version in force again, as a new version. Raises `PoolConflictError` when it is not kept."""
        ...

    async def clear_manifest(self, kind: ManifestKind, *, author: str, expected: int | None = None) -> ManifestChange:
        """Return to no manifest, as a new version. Raises `PoolConflictError` where there is none."""
        ...

    async def explain(self, arrival: Arrival) -> Explanation:
        """What would happen to this request now."""
        ...
