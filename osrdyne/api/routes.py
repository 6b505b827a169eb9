"""The routes of a managed pool over HTTP: `/v1/routes` and `/v1/explain`."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query
from pydantic import BaseModel, Field

from osrdyne.ingress.explain import Explanation
from osrdyne.ingress.requests import sample_arrival
from osrdyne.pool.route_store import KeptManifest, RouteChange
from osrdyne.pool.route_view import RouteInspector

_Author = Annotated[str, Query(min_length=1, max_length=200, description="Who makes the change; kept with it.")]


class Version(BaseModel):
    """One version of the manifest."""

    version: int
    author: str
    at: float = Field(description="When it came into force, seconds since the epoch.")
    manifest: dict[str, Any]

    @classmethod
    def of(cls, kept: KeptManifest) -> Version:
        return cls(version=kept.version, author=kept.author, at=kept.at, manifest=json.loads(kept.manifest))


class Routes(BaseModel):
    """The manifest in force; null where there has never been one, so that everything goes to `$upstream`."""

    pool: str
    current: Version | None


class History(BaseModel):
    """The versions that are kept, the newest first."""

    pool: str
    versions: list[Version]


class Change(BaseModel):
    """What a change did. Requests of a priority that was removed keep it and are served."""

    version: int
    added_priorities: list[int]
    removed_priorities: list[int]
    warnings: list[str]

    @classmethod
    def of(cls, change: RouteChange) -> Change:
        return cls(
            version=change.kept.version,
            added_priorities=list(change.added),
            removed_priorities=list(change.removed),
            warnings=[str(warning) for warning in change.warnings],
        )


class Sample(BaseModel):
    """A request to be explained. It is not sent."""

    key: str
    path: str = ""
    headers: dict[str, str | int | float | bool | None] = {}
    body: Any = Field(None, description="Of content type application/json, in UTF-8; null is no body.")
    app_id: str | None = None
    timeout: float | None = Field(None, gt=0, description="The caller's own limit, seconds.")


def route_routes(inspector: RouteInspector) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.get("/routes", summary="The route manifest in force")
    async def routes() -> Routes:
        versions = await inspector.routes()
        return Routes(pool=inspector.pool, current=Version.of(versions[0]) if versions else None)

    @router.put("/routes", summary="Put a route manifest in force")
    async def change(manifest: Annotated[dict[str, Any], Body()], author: _Author) -> Change:
        return Change.of(await inspector.change_routes(json.dumps(manifest), author=author))

    @router.get("/routes/history", summary="The versions of the manifest, newest first")
    async def history() -> History:
        return History(pool=inspector.pool, versions=[Version.of(kept) for kept in await inspector.routes()])

    @router.post("/routes/rollback", summary="Put an earlier version in force again")
    async def rollback(version: Annotated[int, Query(ge=1)], author: _Author) -> Change:
        return Change.of(await inspector.restore_routes(version, author=author))

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
