"""What the API asks of the daemon about the routes of a managed pool."""

from __future__ import annotations

from typing import Protocol

from osrdyne.ingress.explain import Explanation
from osrdyne.ingress.requests import Arrival
from osrdyne.pool.route_store import KeptManifest, RouteChange


class RouteInspector(Protocol):
    """Every method raises `LeadershipLostError` while this daemon does not lead, and `PoolConflictError` in a direct
    pool."""

    @property
    def pool(self) -> str: ...

    async def routes(self) -> list[KeptManifest]:
        """Every version that is kept, the newest first, which is in force; empty when there has never been one."""
        ...

    async def change_routes(self, text: str, *, author: str) -> RouteChange:
        """Put the manifest of a text in force. Raises `InvalidDocumentError` with every error of it."""
        ...

    async def restore_routes(self, version: int, *, author: str) -> RouteChange:
        """Put an earlier version in force again, as a new version. Raises `PoolConflictError` when it is not kept."""
        ...

    async def explain(self, arrival: Arrival) -> Explanation:
        """What would happen to this request now."""
        ...
