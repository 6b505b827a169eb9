"""`/health` and `/ready` on a socket of their own (`api.probe_port`): clients of the API use up its connections only.

Plain HTTP without tokens: the answers hold nothing but whether the process is alive and ready. Served by `ApiServer`.
"""

from __future__ import annotations

from collections.abc import Collection
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from osrdyne.pool.views import ComponentView, PoolInspector


def is_ready(components: Collection[ComponentView]) -> bool:
    """Whether every required component works. Without components the daemon is still starting."""
    return bool(components) and all(one.ok or not one.fatal for one in components)


def create_probes(inspector: PoolInspector) -> ASGIApp:
    """The application of the socket for probes."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await _answer(Request(scope), inspector)(scope, receive, send)

    return answer


def _answer(request: Request, inspector: PoolInspector) -> JSONResponse:
    if request.method not in {"GET", "HEAD"}:
        return JSONResponse({}, HTTPStatus.METHOD_NOT_ALLOWED)
    match request.url.path:
        case "/health":
            return JSONResponse({"status": "ok"})
        case "/ready":
            ready = is_ready(inspector.components())
            return JSONResponse({"ready": ready}, HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)
        case _:
            return JSONResponse({}, HTTPStatus.NOT_FOUND)
