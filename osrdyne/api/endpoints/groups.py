"""The worker groups of a pool: `/v1/groups`, `/v1/group?key=` for one, which takes every key, and `/status`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from osrdyne.api import models
from osrdyne.api.access.checks import principal_of, protected
from osrdyne.api.keys import KeyPlace, key_schema, query_keys, status_keys
from osrdyne.api.problems import NotFoundError, not_leading
from osrdyne.auth.grants import Grant
from osrdyne.pool.views import PoolInspector, WorkerView
from osrdyne.protocol.names import Key

_NO_GROUP, _LISTED = "There is no group for this key.", "`osrdyne groups list` shows the groups."


def group_list_routes(inspector: PoolInspector) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/groups", summary="All groups, or those of the given keys (`?key=`, repeatable)")
    async def groups(request: Request, keys: Annotated[set[Key] | None, Depends(query_keys)]) -> models.Groups:
        """The groups that the principal may see."""
        may = principal_of(request).may
        found = [view for view in inspector.groups() if keys is None or view.key in keys]
        views = [view for view in found if may(Grant.VIEW, view.key)]
        leading = inspector.leadership().leading
        return models.Groups(pool=inspector.pool, leading=leading, groups=[models.Group.of(view) for view in views])

    @router.get("/status", summary="Workers, as OSRD's client reads them")
    async def status(request: Request, keys: Annotated[set[Key] | None, Depends(status_keys)]) -> models.Status:
        may = principal_of(request).may
        workers = [worker for view in inspector.groups() if may(Grant.VIEW, view.key) for worker in view.workers]
        if keys is None:
            return models.Status(workers={worker.worker_id: models.WorkerStatus.of(worker) for worker in workers})
        return models.Status(workers={key: models.WorkerStatus.of(one) for key, one in _best(workers, keys).items()})

    return router


def _best(workers: list[WorkerView], keys: set[Key]) -> dict[Key, WorkerView]:
    """One worker for each key, preferably one that serves."""
    found: dict[Key, WorkerView] = {}
    for worker in workers:
        known = found.get(worker.key)
        if worker.key in keys and (known is None or (worker.state.serves and not known.state.serves)):
            found[worker.key] = worker
    return found


def group_routes(
    inspector: PoolInspector,
    prefix: str,
    key_of: Callable[[Request], Awaitable[Key]],
    *,
    place: KeyPlace,
) -> APIRouter:
    """The routes of one group. They exist twice, because HTTP clients change the keys `.`, `..` and the empty key in a
    path: `/v1/group?key=` takes every key."""
    router = APIRouter(prefix=prefix, dependencies=[protected(inspector, key_of)])
    requested = Depends(key_of)
    extra = key_schema(place)

    # Actions before the group itself: `{key:path}` would match them as a part of the key.
    @router.get("/logs", summary="The last log lines of the group's workers", openapi_extra=extra)
    async def logs(
        key: Key = requested, lines: int = Query(100, ge=1, le=10_000), previous: bool = False
    ) -> models.Logs:
        if previous:
            ended = await inspector.previous_logs(key, lines=lines)
            return models.Logs(
                key=key,
                workers={one.worker_id: list(one.log_lines) for one in ended},
                ended={
                    one.worker_id: models.WorkerEnd(ended_with=one.ended_with, reason=one.said, at=one.at)
                    for one in ended
                },
            )
        found = await inspector.logs(key, lines=lines)
        return models.Logs(key=key, workers={worker: list(text) for worker, text in found.items()})

    @router.post("/start", summary="Start the group, as a request would", status_code=202, openapi_extra=extra)
    async def start(key: Key = requested) -> models.Accepted:
        await inspector.start_group(key)
        return models.Accepted(key=key, accepted="start")

    @router.post("/stop", summary="Stop the group when its work is done", status_code=202, openapi_extra=extra)
    async def stop(key: Key = requested) -> models.StopAccepted:
        return models.StopAccepted(key=key, accepted="stop", has_group=await inspector.stop_group(key))

    @router.post("/pin", summary="Keep the group active until it is unpinned", status_code=202, openapi_extra=extra)
    async def pin(key: Key = requested) -> models.Accepted:
        await inspector.pin(key)
        return models.Accepted(key=key, accepted="pin")

    @router.post("/unpin", summary="Let the group end when it is idle", status_code=202, openapi_extra=extra)
    async def unpin(key: Key = requested) -> models.Accepted:
        await inspector.unpin(key)
        return models.Accepted(key=key, accepted="unpin")

    @router.post("/reload", summary="Load the data of the group's workers again", openapi_extra=extra)
    async def reload(key: Key = requested, timeout: float = Query(60.0, gt=0, le=3600)) -> models.Reload:
        if inspector.leadership().leading and inspector.group(key) is None:
            raise NotFoundError(_NO_GROUP, _LISTED)
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
        if view is None and not inspector.leadership().leading:
            raise not_leading(await inspector.leader())
        if view is None:
            raise NotFoundError(_NO_GROUP, _LISTED)
        return models.Group.of(view)

    return router
