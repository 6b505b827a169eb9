"""The manifests of a managed pool over HTTP: `/v1/routes`, `/v1/splitter` and `/v1/explain`."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, Self

from fastapi import APIRouter, Body, Query
from pydantic import BaseModel, Field

from osrdyne.ingress.explain import Explanation
from osrdyne.ingress.requests import sample_arrival
from osrdyne.pool.manifest_store import KeptManifest, ManifestChange, ManifestKind
from osrdyne.pool.manifest_view import ManifestInspector
from osrdyne.pool.routes_in_force import RouteChange

_Author = Annotated[str, Query(min_length=1, max_length=200, description="Who makes the change; kept with it.")]
_Manifest = Annotated[dict[str, Any], Body()]
_Version = Annotated[int, Query(ge=1)]


class Version(BaseModel):
    """One version of a manifest."""

    version: int
    author: str
    at: float = Field(description="When it came into force, seconds since the epoch.")
    manifest: dict[str, Any]

    @classmethod
    def of(cls, kept: KeptManifest) -> Version:
        return cls(version=kept.version, author=kept.author, at=kept.at, manifest=json.loads(kept.manifest))


class InForce(BaseModel):
    """The manifest in force; null where there has never been one."""

    pool: str
    current: Version | None


class History(BaseModel):
    """The versions that are kept, the newest first."""

    pool: str
    versions: list[Version]


class Change(BaseModel):
    """What a change did."""

    version: int
    warnings: list[str]

    @classmethod
    def of(cls, change: ManifestChange) -> Self:
        return cls(version=change.kept.version, warnings=[str(warning) for warning in change.warnings])


class ChangedRoutes(Change):
    """What a change of the routes did. Requests of a priority that was removed keep it and are served."""

    added_priorities: list[int] = []
    removed_priorities: list[int] = []
    pending: dict[int, int] = Field(
        {}, description="Requests that wait in queues of priorities that no route uses, by priority: they are served."
    )

    @classmethod
    def of(cls, change: ManifestChange) -> Self:
        changed = super().of(change)
        if isinstance(change, RouteChange):
            changed.added_priorities, changed.removed_priorities = list(change.added), list(change.removed)
            changed.pending = dict(change.pending)
        return changed


class Sample(BaseModel):
    """A request to be explained. It is not sent."""

    key: str
    path: str = ""
    headers: dict[str, str | int | float | bool | None] = {}
    body: Any = Field(None, description="Of content type application/json, in UTF-8; null is no body.")
    app_id: str | None = None
    timeout: float | None = Field(None, gt=0, description="The caller's own limit, seconds.")


def manifest_routes(inspector: ManifestInspector) -> APIRouter:
    router = APIRouter(prefix="/v1")
    _add_kind(router, inspector, ManifestKind.ROUTES, "route manifest", ChangedRoutes)
    _add_kind(router, inspector, ManifestKind.SPLITTER, "splitter manifest", Change)

    @router.post("/explain", summary="What would happen to a request, and why")
    async def explain(sample: Sample) -> dict[str, Any]:
        arrival = sample_arrival(
            sample.key,
            sample.path,
            headers=sample.headers,
            body=None if sample.body is None else json.dumps(sample.body).encode(),
            app_id=sample.app_id,
            timeout=sample.timeout,
            now=time.time(),
        )
        explanation: Explanation = await inspector.explain(arrival)
        return explanation.to_json()

    return router


def _add_kind(
    router: APIRouter, inspector: ManifestInspector, kind: ManifestKind, name: str, answer: type[Change]
) -> None:
    """The paths of one kind of manifest."""

    @router.get(f"/{kind}", summary=f"The {name} in force")
    async def current() -> InForce:
        versions = await inspector.manifests(kind)
        return InForce(pool=inspector.pool, current=Version.of(versions[0]) if versions else None)

    @router.put(f"/{kind}", summary=f"Put a {name} in force", response_model=answer)
    async def change(manifest: _Manifest, author: _Author) -> Change:
        return answer.of(await inspector.change_manifest(kind, json.dumps(manifest), author=author))

    @router.get(f"/{kind}/history", summary=f"The versions of the {name}, newest first")
    async def history() -> History:
        versions = await inspector.manifests(kind)
        return History(pool=inspector.pool, versions=[Version.of(kept) for kept in versions])

    @router.post(f"/{kind}/rollback", summary="Put an earlier version in force again", response_model=answer)
    async def rollback(version: _Version, author: _Author) -> Change:
        return answer.of(await inspector.restore_manifest(kind, version, author=author))
