"""The state of one daemon: `/health`, `/ready`, `/version`, `/metrics`, `/v1/leadership`."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from osrdyne.api import models
from osrdyne.api.access.checks import principal_of
from osrdyne.api.endpoints.metrics import measure
from osrdyne.api.probes import is_ready
from osrdyne.auth.grants import Grant
from osrdyne.metrics import Metrics
from osrdyne.pool.views import PoolInspector


def daemon_routes(inspector: PoolInspector, metrics: Metrics, version: str) -> APIRouter:
    router = APIRouter()

    @router.get("/health", summary="The process is alive")
    async def health() -> models.Health:
        return models.Health()

    @router.get("/ready", summary="Whether every required component works; 503 if one does not")
    async def ready(request: Request, response: Response) -> models.Readiness:
        views = inspector.components()
        components = [models.Component.of(view) for view in views]
        works = is_ready(views)
        response.status_code = HTTPStatus.OK if works else HTTPStatus.SERVICE_UNAVAILABLE
        principal = principal_of(request)  # a probe has no token and needs only the status
        return models.Readiness(
            ready=works,
            pool=inspector.pool,
            role="leader" if inspector.leadership().leading else "standby",
            leader=await inspector.leader() if principal.may(Grant.VIEW) else None,
            # Their details name keys of the whole pool.
            components=[] if principal.is_limited(Grant.VIEW) else components,
        )

    @router.get("/version", summary="The version of osrdyne")
    async def show_version() -> models.Version:
        return models.Version(version=version)

    @router.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def show_metrics() -> Response:
        await measure(inspector, metrics)
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/leadership", summary="Whether this daemon leads its pool, and which one does")
    async def leadership() -> models.Leadership:
        return models.Leadership.of(inspector.pool, inspector.leadership(), leader=await inspector.leader())

    return router
