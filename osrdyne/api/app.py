"""The FastAPI application: routes over a `PoolInspector`. Decides nothing and keeps nothing.

There are no HTML pages: Swagger's would load scripts from elsewhere. The schema is at `/openapi.json`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from osrdyne.aio.clock import Clock, SystemClock
from osrdyne.api import models
from osrdyne.api.access.audit import Auditor, audit_routes
from osrdyne.api.access.authenticators import Authenticators
from osrdyne.api.access.checks import Access, ForbiddenError, forbidden, principal_of, protected
from osrdyne.api.access.guard import Guard
from osrdyne.api.bodies import BodyLimits, BodyReader
from osrdyne.api.endpoints.capacity import capacity_routes
from osrdyne.api.endpoints.circuits import circuit_routes
from osrdyne.api.endpoints.lag import lag_routes
from osrdyne.api.endpoints.last_values import last_value_routes
from osrdyne.api.endpoints.manifests import manifest_routes
from osrdyne.api.endpoints.poison import poison_routes
from osrdyne.api.endpoints.queues import queue_routes
from osrdyne.api.endpoints.telemetry import telemetry_routes
from osrdyne.api.keys import KeyPlace, key_schema, path_key, query_key, query_keys, status_keys
from osrdyne.api.problems import problem, problem_of
from osrdyne.auth.grants import Grant
from osrdyne.errors import ConfigurationError, LastValueStoreError, OsrdyneError
from osrdyne.ingress.routes.retries import in_seconds
from osrdyne.metrics import Metrics, priority_label
from osrdyne.pool.state.groups import GroupStatus
from osrdyne.pool.state.worker_reports import WorkerState
from osrdyne.pool.views import PoolInspector, ProcessStatus, ProcessView, WorkerView
from osrdyne.protocol.names import Key, WorkerId
from osrdyne.telemetry.last_values.store import counts_by_name

LAST_VALUES_TIMEOUT = 2.0
"""Seconds: Prometheus gives up a scrape after ten."""


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
) -> FastAPI:
    """The application. `allowed_hosts`: the `Host` names to answer (see `guard.hosts_of`), None for any; `access` None:
    no request needs a token; `audit_required`: no change without a stored record."""
    clock = clock or SystemClock()
    app = FastAPI(
        title="osrdyne",
        version=version,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={"default": {"model": models.ProblemDetail, "description": "An error."}},
    )
    app.include_router(_process_routes(inspector, metrics, version))
    app.include_router(_pool_routes(inspector))
    app.include_router(poison_routes(inspector))
    app.include_router(manifest_routes(inspector))
    app.include_router(circuit_routes(inspector))
    app.include_router(capacity_routes(inspector))
    app.include_router(lag_routes(inspector))
    app.include_router(telemetry_routes(inspector))
    app.include_router(last_value_routes(inspector))
    app.include_router(queue_routes(inspector))
    app.include_router(audit_routes(inspector, inspector.pool))
    app.include_router(_group_routes(inspector, "/v1/group", query_key, place="query"))
    app.include_router(_group_routes(inspector, "/v1/groups/{key:path}", path_key, place="path"))
    app.add_exception_handler(OsrdyneError, _on_own_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_parameter)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ForbiddenError, _on_forbidden)
    app.add_middleware(
        Guard,
        allowed_hosts=allowed_hosts,
        access=access or Access(Authenticators()),
        bodies=BodyReader(limits or BodyLimits()),
        auditor=Auditor(inspector, metrics, clock=clock, required=audit_required),
    )
    return app


def _process_routes(inspector: PoolInspector, metrics: Metrics, version: str) -> APIRouter:
    router = APIRouter()

    @router.get("/health", summary="The process is alive")
    async def health() -> models.Health:
        return models.Health()

    @router.get("/ready", summary="Every component that is needed is well; 503 when one is not")
    async def ready(request: Request, response: Response) -> models.Readiness:
        components = [models.Component.of(view) for view in inspector.components()]
        is_ready = bool(components) and all(one.ok or not one.fatal for one in components)  # none: it is still starting
        response.status_code = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        principal = principal_of(request)  # a probe has no token, and needs the status only
        return models.Readiness(
            ready=is_ready,
            pool=inspector.pool,
            role="leader" if inspector.leadership().leading else "standby",
            leader=await inspector.leader() if principal.may(Grant.VIEW) else None,
            # Their details name keys of the whole pool.
            components=[] if principal.is_limited(Grant.VIEW) else components,
        )

    @router.get("/version", summary="Which osrdyne this is")
    async def show_version() -> models.Version:
        return models.Version(version=version)

    @router.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def show_metrics() -> Response:
        _count_groups_and_workers(inspector, metrics)
        _measure_processes(inspector, metrics)
        _tell_what_waits(inspector, metrics)
        _tell_used_quotas(inspector, metrics)
        await _count_last_values(inspector, metrics)
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/status", summary="Workers, as OSRD's client reads them")
    async def status(request: Request, keys: Annotated[set[Key] | None, Depends(status_keys)]) -> models.Status:
        may = principal_of(request).may
        workers = [worker for view in inspector.groups() if may(Grant.VIEW, view.key) for worker in view.workers]
        if keys is None:
            return models.Status(workers={worker.worker_id: models.WorkerStatus.of(worker) for worker in workers})
        return models.Status(workers={key: models.WorkerStatus.of(one) for key, one in _best(workers, keys).items()})

    return router


def _count_groups_and_workers(inspector: PoolInspector, metrics: Metrics) -> None:
    """Counted when they are asked for, so that they cannot drift."""
    views = inspector.groups()
    groups = Counter(view.state for view in views)
    workers = Counter(worker.state for view in views for worker in view.workers)
    for group_state in GroupStatus:
        metrics.groups.labels(group_state).set(groups[group_state])
    for worker_state in WorkerState:
        metrics.workers.labels(worker_state).set(workers[worker_state])


async def _count_last_values(inspector: PoolInspector, metrics: Metrics) -> None:
    """From the store, which counts in the transactions that change values."""
    metrics.last_value_events.clear()
    totals = None
    # `osrdyne last` shows the reason. All other metrics are answered in time, whatever the database does.
    with suppress(LastValueStoreError, ConfigurationError, TimeoutError):
        async with asyncio.timeout(LAST_VALUES_TIMEOUT):
            totals = await inspector.last_value_totals()
    if totals is not None:
        for outcome, count in counts_by_name(totals).items():
            metrics.last_value_events.labels(outcome).set(count)


def _measure_processes(inspector: PoolInspector, metrics: Metrics) -> None:
    gauges = (metrics.process_keys, metrics.process_heap, metrics.process_memory, metrics.process_memory_share)
    for gauge in gauges:
        gauge.clear()
    views = inspector.processes()
    states = Counter(view.state for view in views)
    for state in ProcessStatus:
        metrics.processes.labels(state).set(states[state])
    for view in views:
        slot = str(view.slot)
        if view.state is not ProcessStatus.ENDED:
            metrics.process_keys.labels(slot).set(len(view.keys))
            if view.heap_used is not None:
                metrics.process_heap.labels(slot).set(view.heap_used)
            if view.memory is not None:
                metrics.process_memory.labels(slot).set(view.memory)
            if view.memory_share is not None:
                metrics.process_memory_share.labels(slot).set(view.memory_share)


def _tell_what_waits(inspector: PoolInspector, metrics: Metrics) -> None:
    metrics.waiting.clear()
    metrics.oldest.clear()
    metrics.retrying.clear()
    for delay_ms, requests in inspector.retrying().items():
        metrics.retrying.labels(delay=in_seconds(delay_ms)).set(requests)
    for view in inspector.waiting():
        labels = {"priority": priority_label(view.priority)}
        metrics.waiting.labels(**labels).set(view.requests)
        if view.oldest_age is not None:
            metrics.oldest.labels(**labels).set(view.oldest_age)


def _tell_used_quotas(inspector: PoolInspector, metrics: Metrics) -> None:
    metrics.quota_used.clear()
    usage = inspector.quota_usage()
    for meter in () if usage is None else usage.meters:
        if meter.ratio is not None:
            metrics.quota_used.labels(meter=meter.name).set(meter.ratio)


def _best(workers: list[WorkerView], keys: set[Key]) -> dict[Key, WorkerView]:
    """One worker for each key: one that serves, where there is one."""
    found: dict[Key, WorkerView] = {}
    for worker in workers:
        known = found.get(worker.key)
        if worker.key in keys and (known is None or (worker.state.serves and not known.state.serves)):
            found[worker.key] = worker
    return found


def _pool_routes(inspector: PoolInspector) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.get("/groups", summary="All groups, or those of the given keys (`?key=`, repeatable)")
    async def groups(request: Request, keys: Annotated[set[Key] | None, Depends(query_keys)]) -> models.Groups:
        """Those that the principal may see."""
        may = principal_of(request).may
        found = [view for view in inspector.groups() if keys is None or view.key in keys]
        views = [view for view in found if may(Grant.VIEW, view.key)]
        leading = inspector.leadership().leading
        return models.Groups(pool=inspector.pool, leading=leading, groups=[models.Group.of(view) for view in views])

    @router.get("/processes", summary="The processes of pooled workers; none in a pool of dedicated workers")
    async def processes() -> models.Processes:
        found = [models.Process.of(view) for view in inspector.processes()]
        return models.Processes(pool=inspector.pool, leading=inspector.leadership().leading, processes=found)

    @router.get("/processes/{worker_id}", summary="One process, by its worker id or the beginning of it")
    async def process(worker_id: str) -> models.Process:
        return models.Process.of(one_process(worker_id))

    @router.get("/processes/{worker_id}/logs", summary="The last log lines of a process, of all its keys")
    async def process_logs(worker_id: str, lines: int = Query(100, ge=1, le=10_000)) -> models.ProcessLogs:
        found = WorkerId(one_process(worker_id).worker_id)
        return models.ProcessLogs(worker_id=found, lines=list(await inspector.process_logs(found, lines=lines)))

    def one_process(worker_id: str) -> ProcessView:
        found = [view for view in inspector.processes() if view.worker_id.startswith(worker_id)]
        if len(found) != 1:
            detail = "There is no such process." if not found else "Several processes have an id that begins like this."
            raise HTTPException(HTTPStatus.NOT_FOUND, detail)
        return found[0]

    @router.get("/leadership", summary="Whether this daemon leads its pool, and which one does")
    async def leadership() -> models.Leadership:
        return models.Leadership.of(inspector.pool, inspector.leadership(), leader=await inspector.leader())

    return router


def _group_routes(
    inspector: PoolInspector,
    prefix: str,
    key_of: Callable[[Request], Awaitable[Key]],
    *,
    place: KeyPlace,
) -> APIRouter:
    """The routes of one group. They exist twice, because no HTTP client sends the keys `.`, `..` and the empty one
    in a path as they are: `/v1/group?key=` takes every key."""
    router = APIRouter(prefix=prefix, dependencies=[protected(inspector, key_of)])
    requested = Depends(key_of)
    extra = key_schema(place)

    # Actions before the group itself: `{key:path}` would take them for part of the key.
    @router.get("/logs", summary="The last log lines of the group's workers", openapi_extra=extra)
    async def logs(key: Key = requested, lines: int = Query(100, ge=1, le=10_000)) -> models.Logs:
        found = await inspector.logs(key, lines=lines)
        return models.Logs(key=key, workers={worker: list(text) for worker, text in found.items()})

    @router.post("/start", summary="Require the group, as a request would", status_code=202, openapi_extra=extra)
    async def start(key: Key = requested) -> models.Accepted:
        await inspector.start_group(key)
        return models.Accepted(key=key, accepted="start")

    @router.post("/stop", summary="Begin the group's orderly end now", status_code=202, openapi_extra=extra)
    async def stop(key: Key = requested) -> models.Accepted:
        await inspector.stop_group(key)
        return models.Accepted(key=key, accepted="stop")

    @router.post("/pin", summary="Keep the group up until it is unpinned", status_code=202, openapi_extra=extra)
    async def pin(key: Key = requested) -> models.Accepted:
        await inspector.pin(key)
        return models.Accepted(key=key, accepted="pin")

    @router.post("/unpin", summary="Let the group go when it is idle", status_code=202, openapi_extra=extra)
    async def unpin(key: Key = requested) -> models.Accepted:
        await inspector.unpin(key)
        return models.Accepted(key=key, accepted="unpin")

    @router.post("/reload", summary="Load the data of the group's workers again", openapi_extra=extra)
    async def reload(key: Key = requested, timeout: float = Query(60.0, gt=0, le=3600)) -> models.Reload:
        if inspector.leadership().leading and inspector.group(key) is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, "There is no group for this key.")
        found = await inspector.reload_group(key, timeout=timeout)
        return models.Reload(
            key=key,
            workers=[
                models.WorkerReload(worker_id=one.worker_id, outcome=one.outcome, reason=one.reason) for one in found
            ],
        )

    @router.get("", summary="One group", openapi_extra=extra)
    async def group(key: Key = requested) -> models.Group:
        view = inspector.group(key)
        if view is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, "There is no group for this key.")
        return models.Group.of(view)

    return router


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


_REMEDIES = {404: "`osrdyne groups list` shows the groups there are, /openapi.json the paths."}


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    code = status.phrase.lower().replace(" ", "-")
    answer = problem(status, code=code, detail=error.detail, remedy=_REMEDIES.get(error.status_code))
    answer.headers.update(error.headers or {})
    return answer
