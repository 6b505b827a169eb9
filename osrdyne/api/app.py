"""The FastAPI application: endpoints over a `PoolInspector`, without decisions or state.

It has no HTML pages, because Swagger's would load scripts from another site. The schema is at `/openapi.json`.
"""

from __future__ import annotations

from collections.abc import Collection
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from osrdyne.aio.clock import Clock, SystemClock
from osrdyne.api import models
from osrdyne.api.access.audit import Auditor, audit_routes
from osrdyne.api.access.authenticators import Authenticators
from osrdyne.api.access.checks import Access, ForbiddenError, forbidden
from osrdyne.api.access.guard import Guard
from osrdyne.api.bodies import BodyLimits, BodyReader
from osrdyne.api.endpoints.capacity import capacity_routes
from osrdyne.api.endpoints.circuits import circuit_routes
from osrdyne.api.endpoints.daemon import daemon_routes
from osrdyne.api.endpoints.groups import group_list_routes, group_routes
from osrdyne.api.endpoints.lag import lag_routes
from osrdyne.api.endpoints.last_values import last_value_routes
from osrdyne.api.endpoints.manifests import manifest_routes
from osrdyne.api.endpoints.poison import poison_routes
from osrdyne.api.endpoints.processes import process_routes
from osrdyne.api.endpoints.queue_circuits import queue_circuit_routes
from osrdyne.api.endpoints.queues import queue_routes
from osrdyne.api.endpoints.telemetry import telemetry_routes
from osrdyne.api.keys import path_key, query_key
from osrdyne.api.problems import NO_SUCH_PATH, problem, problem_of
from osrdyne.auth.endpoints import CIRCUITS_PATH
from osrdyne.errors import OsrdyneError
from osrdyne.metrics import Metrics
from osrdyne.pool.views import PoolInspector


def create_app(
    inspector: PoolInspector,
    metrics: Metrics,
    *,
    version: str,
    allowed_hosts: Collection[str] | None = None,
    access: Access | None = None,
    limits: BodyLimits | None = None,
    audit_required: bool = False,
    clock: Clock | None = None,
    circuits_path: str = CIRCUITS_PATH,
) -> FastAPI:
    """The application. `allowed_hosts`: the accepted `Host` names (see `guard.hosts_of`); None: any. `access` None: no
    request needs a token. `audit_required`: refuse changes without a stored record. `circuits_path`: another path of
    the circuits in Gateleen's shapes."""
    clock = clock or SystemClock()
    app = FastAPI(
        title="osrdyne",
        version=version,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={"default": {"model": models.ProblemDetail, "description": "An error."}},
    )
    app.include_router(daemon_routes(inspector, metrics, version))
    app.include_router(group_list_routes(inspector))
    app.include_router(process_routes(inspector))
    app.include_router(poison_routes(inspector))
    app.include_router(manifest_routes(inspector))
    app.include_router(circuit_routes(inspector))
    app.include_router(queue_circuit_routes(inspector))
    app.include_router(capacity_routes(inspector))
    app.include_router(lag_routes(inspector))
    app.include_router(telemetry_routes(inspector))
    app.include_router(last_value_routes(inspector))
    app.include_router(queue_routes(inspector))
    app.include_router(audit_routes(inspector, inspector.pool))
    app.include_router(group_routes(inspector, "/v1/group", query_key, place="query"))
    app.include_router(group_routes(inspector, "/v1/groups/{key:path}", path_key, place="path"))
    app.add_exception_handler(OsrdyneError, _on_own_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_parameter)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ForbiddenError, _on_forbidden)
    app.add_middleware(
        Guard,
        allowed_hosts=allowed_hosts,
        access=access or Access(Authenticators()),
        circuits_path=circuits_path,
        bodies=BodyReader(limits or BodyLimits()),
        auditor=Auditor(inspector, metrics, clock=clock, required=audit_required),
    )
    return app


async def _on_forbidden(_: Request, error: Exception) -> Response:
    assert isinstance(error, ForbiddenError)
    return forbidden(error.denial)


async def _on_own_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, OsrdyneError)
    return problem_of(error)


async def _on_invalid_parameter(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    details = "; ".join(f"{detail['loc'][-1]}: {detail['msg']}" for detail in error.errors())
    return problem(HTTPStatus.UNPROCESSABLE_ENTITY, code="invalid-parameter", detail=details)


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.detail == HTTPStatus.NOT_FOUND.phrase:  # of the router
        error = NO_SUCH_PATH
    status = HTTPStatus(error.status_code)
    code = status.phrase.lower().replace(" ", "-")
    answer = problem(status, code=code, detail=error.detail, remedy=getattr(error, "remedy", None))
    answer.headers.update(error.headers or {})
    return answer
