"""The checks before every HTTP request, as plain ASGI. In this order:

- The `Host` header: a web page can point a name of its own at 127.0.0.1 (DNS rebinding) and then read the API as its
  own site. On loopback only names of loopback are accepted, elsewhere those of `api.allowed_hosts`.
- The raw path for routing, so that an encoded slash stays part of its key. Access is decided by the same path.
- Tokens and roles (`access`), before the body is read.
- CSRF, for every method but GET, HEAD and OPTIONS: `Sec-Fetch-Site` and `Origin` must not name another site, and
  `Content-Type: application/json` is required (for a queue also `application/atom+xml`), except for DELETE, which has
  no body. A browser sends any of them across sites only after a preflight request, which is never granted here.
- The body, within limits of size and time (`bodies`).
- The record of a change (`audit`), before the change and with its outcome.
- Unexpected errors: logged, and answered without details.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection
from http import HTTPStatus
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from osrdyne.api.access.audit import Auditor, Change
from osrdyne.api.access.checks import Access
from osrdyne.api.bodies import BodyReader, ClientGoneError, replayed
from osrdyne.api.problems import problem
from osrdyne.auth.decision import is_loopback
from osrdyne.auth.endpoints import CIRCUITS_PATH, find_endpoint
from osrdyne.ingress.policies.atom import ATOM_TYPE
from osrdyne.logs import get_logger

_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]*", re.ASCII)
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_ATOM_PATHS = frozenset({"/v1/queue", "/v1/queues"})

log = get_logger("api")


class Guard:
    """Wraps the application. `allowed_hosts` None: accept every `Host`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        allowed_hosts: Collection[str] | None,
        access: Access,
        bodies: BodyReader,
        auditor: Auditor,
        circuits_path: str = CIRCUITS_PATH,
    ) -> None:
        self._app = app
        self._allowed_hosts = None if allowed_hosts is None else {host.lower() for host in allowed_hosts}
        self._access = access
        self._circuits_paths = (circuits_path.rstrip("/"), CIRCUITS_PATH)
        self._bodies = bodies
        self._auditor = auditor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["raw_path"].decode("latin-1") if scope.get("raw_path") else scope["path"]
        scope = {**scope, "path": self._own_path(path)}
        refusal = await self._refusal(scope)
        if refusal is not None:
            self._auditor.note_answer(scope, refusal.status_code)
            await refusal(scope, receive, send)
            return
        try:
            body = await self._bodies.read(scope, receive)
        except ClientGoneError:
            return
        if isinstance(body, JSONResponse):
            await body(scope, receive, send)
            return
        await self._run(scope, replayed(body, receive), send)

    def _own_path(self, path: str) -> str:
        """The path in the application. Clients of Gateleen have a path of their own to the circuits, often with a slash
        at the end."""
        for prefix in self._circuits_paths:
            if path == prefix or path.startswith(f"{prefix}/"):
                return CIRCUITS_PATH + path[len(prefix) :].rstrip("/")
        return path

    async def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        return (
            self._refuse_unknown_host(scope, headers)
            or await self._access.admit(scope)
            or (None if scope["method"] in _SAFE_METHODS else _refuse_cross_site(scope, headers))
        )

    def _refuse_unknown_host(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        host = _host_name(headers.get("host", ""))
        if self._allowed_hosts is not None and host not in self._allowed_hosts and host != _own_address(scope):
            return problem(
                HTTPStatus.MISDIRECTED_REQUEST,
                code="unknown-host",
                detail="This API does not answer to the name in the Host header.",
                remedy="Use the address it listens on, or add the name to api.allowed_hosts.",
            )
        return None

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        change: Change | None = None

        async def remember_start(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._auditor.note_answer(scope, message["status"])
                if change is not None:
                    # Before the answer: a client that has it finds the record.
                    await self._auditor.finish(change, message["status"])
                    name = (b"x-request-id", change.record.request_id.encode())
                    message = {**message, "headers": [*message.get("headers", ()), name]}
            await send(message)

        try:
            if find_endpoint(scope["method"], scope["path"])[0].is_probe:
                await self._app(scope, receive, remember_start)
                # After the answer: RabbitMQ may not confirm the record for seconds, and a probe must not fail then.
                await self._auditor.note_tokens(self._access.take_token_changes())
                return
            await self._auditor.note_tokens(self._access.take_token_changes())
            change = await self._auditor.begin(scope)
            refusal = None if change is None else self._auditor.refusal(change)
            await (refusal or self._app)(scope, receive, remember_start)
        except Exception as error:
            log.exception("request failed", path=scope["path"], error=type(error).__name__)
            if not started:
                answer = problem(
                    HTTPStatus.INTERNAL_SERVER_ERROR,
                    code="internal",
                    detail="Something unexpected went wrong; the daemon's log has the details.",
                )
                await answer(scope, receive, remember_start)


def _refuse_cross_site(scope: Scope, headers: Headers) -> JSONResponse | None:
    """The refusal of a request that a page of another site could have sent; None if it could not."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        foreign = site not in {"same-origin", "none"}
    else:
        foreign = origin is not None and origin.lower().partition("://")[2] != headers.get("host", "").lower()
    if foreign:
        return problem(
            HTTPStatus.FORBIDDEN,
            code="cross-site",
            detail="A web page of another site sent this request.",
            remedy="Use the command line, or a program that is not a browser.",
        )
    sent = headers.get("content-type", "").partition(";")[0].strip().lower()
    is_known = sent == "application/json" or (sent == ATOM_TYPE and scope["path"] in _ATOM_PATHS)
    if scope["method"] != "DELETE" and not is_known:
        return problem(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            code="json-required",
            detail="A request that changes something needs the header Content-Type: application/json.",
            remedy="Add the header; the body may be empty.",
        )
    return None


def hosts_of(address: str, allowed: Collection[str]) -> Collection[str] | None:
    """The accepted `Host` names of an API that listens on `address`; None: any name, only without authentication.
    Beyond loopback the host's own name is accepted, because daemons announce it to each other."""
    own = {"localhost", "127.0.0.1", "::1", address}
    if is_loopback(address):
        return {*own, *allowed}
    return {*own, socket.gethostname(), *allowed} if allowed else None


def _own_address(scope: Scope) -> str | None:
    """The local address of the connection, which probes and scrapers use as `Host`. DNS rebinding needs a name."""
    server = scope.get("server")
    if server is None or server[1] is None or is_loopback(str(server[0])):
        return None
    return str(server[0]).lower()


def _host_name(header: str) -> str:
    """The host of `host:port`, in lower case, without the brackets of IPv6; empty if it is invalid."""
    if not _HOST.fullmatch(header):
        return ""  # with a user, a path or a blank, another program may read another name
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
