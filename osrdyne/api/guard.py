"""What every HTTP request passes first, as plain ASGI.

- The `Host` header: a web page can point a name of its own at 127.0.0.1 (DNS rebinding) and would then read the API as
  its own site; on loopback only loopback's names are answered, elsewhere whatever `api.allowed_hosts` says.
- `Content-Type: application/json` on everything that changes something: a browser sends it across sites only after a
  preflight request, which is never granted here (CSRF).
- The raw path for routing, so that an encoded slash stays part of its key.
- Unexpected errors: logged, and answered without any detail.
"""

from __future__ import annotations

from collections.abc import Collection
from http import HTTPStatus
from ipaddress import ip_address
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from osrdyne.api.problems import problem
from osrdyne.logs import get_logger

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

log = get_logger("api")


class Guard:
    """Wraps the application. `allowed_hosts` None answers every `Host`."""

    def __init__(self, app: ASGIApp, *, allowed_hosts: Collection[str] | None) -> None:
        self._app = app
        self._allowed_hosts = None if allowed_hosts is None else {host.lower() for host in allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope["method"], Headers(scope=scope))
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        scope = {**scope, "path": scope["raw_path"].decode("latin-1")} if scope.get("raw_path") else scope
        await self._run(scope, receive, send)

    def _refusal(self, method: str, headers: Headers) -> JSONResponse | None:
        if self._allowed_hosts is not None and _host_name(headers.get("host", "")) not in self._allowed_hosts:
            return problem(
                HTTPStatus.MISDIRECTED_REQUEST,
                code="unknown-host",
                detail="This API does not answer to the name in the Host header.",
                remedy="Use the address it listens on, or add the name to api.allowed_hosts.",
            )
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method not in _SAFE_METHODS and content_type != "application/json":
            return problem(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                code="json-required",
                detail="A request that changes something needs the header Content-Type: application/json.",
                remedy="Add the header; the body may be empty.",
            )
        return None

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def remember_start(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, remember_start)
        except Exception as error:
            log.exception("request failed", path=scope["path"], error=type(error).__name__)
            if not started:
                answer = problem(
                    HTTPStatus.INTERNAL_SERVER_ERROR,
                    code="internal",
                    detail="Something unexpected went wrong; the daemon's log has the details.",
                )
                await answer(scope, receive, send)


def hosts_of(address: str, allowed: Collection[str]) -> Collection[str] | None:
    """The `Host` names to answer when listening on `address`; None for any."""
    try:
        loopback = ip_address(address).is_loopback
    except ValueError:
        loopback = address == "localhost"
    if loopback:
        return {"localhost", "127.0.0.1", "::1", address, *allowed}
    return {address, "localhost", "127.0.0.1", "::1", *allowed} if allowed else None


def _host_name(header: str) -> str:
    """The host of `host:port`, lower case, without the brackets of IPv6; empty when it cannot be read."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
