"""The processes of pooled workers: `/v1/processes`."""

from __future__ import annotations

from fastapi import APIRouter, Query

from osrdyne.api import models
from osrdyne.api.problems import NotFoundError, not_leading
from osrdyne.pool.views import PoolInspector, ProcessView
from osrdyne.protocol.names import WorkerId


def process_routes(inspector: PoolInspector) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.get("/processes", summary="The processes of pooled workers; empty in a pool of dedicated workers")
    async def processes() -> models.Processes:
        found = [models.Process.of(view) for view in inspector.processes()]
        return models.Processes(pool=inspector.pool, leading=inspector.leadership().leading, processes=found)

    @router.get("/processes/{worker_id}", summary="One process, by its worker id or the beginning of it")
    async def process(worker_id: str) -> models.Process:
        return models.Process.of(await one_process(worker_id))

    @router.get("/processes/{worker_id}/logs", summary="The last log lines of a process, of all its keys")
    async def process_logs(worker_id: str, lines: int = Query(100, ge=1, le=10_000)) -> models.ProcessLogs:
        found = WorkerId((await one_process(worker_id)).worker_id)
        return models.ProcessLogs(worker_id=found, lines=list(await inspector.process_logs(found, lines=lines)))

    async def one_process(worker_id: str) -> ProcessView:
        found = [view for view in inspector.processes() if view.worker_id.startswith(worker_id)]
        if not found and not inspector.leadership().leading:
            raise not_leading(await inspector.leader())
        if len(found) != 1:
            detail = "There is no such process." if not found else "Several processes have an id that begins like this."
            raise NotFoundError(detail, "`osrdyne workers list` shows the processes.")
        return found[0]

    return router
