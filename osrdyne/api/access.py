"""Asks `osrdyne.auth` whether a request may pass, and puts its answer into HTTP."""

from __future__ import annotations

from datetime import UTC, datetime
from http import HTTPStatus

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from osrdyne.aio.clock import Clock
from osrdyne.api.problems import problem
from osrdyne.api.token_file import TokenFile, tokens_of
from osrdyne.auth.decision import LOCAL, OPEN, Decision, Principal, Refusal, decide
from osrdyne.auth.tokens import Role
from osrdyne.config.models import ApiSettings
from osrdyne.errors import OsrdyneError

_LOCAL = "osrdyne.local"
_PRINCIPAL = "osrdyne.principal"


class ForbiddenError(OsrdyneError):
    """The role of the request's token does not allow what it asks for."""

    def __init__(self, role: Role) -> None:
        super().__init__(Refusal.FORBIDDEN.value, role=role)
        self.role = role


class Local:
    """Marks the requests of a listener that only permitted users of this host can reach: the Unix socket."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, _LOCAL: True}, receive, send)


class Access:
    """Who may use the API. `tokens` None: everyone who reaches it."""

    def __init__(self, tokens: TokenFile | None, *, clock: Clock) -> None:
        self._tokens = tokens
        self._clock = clock

    def admit(self, scope: Scope) -> JSONResponse | None:
        """None for a request that may pass, which then knows its principal; else the answer."""
        if scope.get(_LOCAL):
            scope[_PRINCIPAL] = LOCAL
            return None
        decision = decide(
            scope["method"],
            scope["path"],
            authorization=Headers(scope=scope).getlist("authorization"),
            tokens=None if self._tokens is None else self._tokens.current(),
            now=datetime.fromtimestamp(self._clock.time(), UTC),
        )
        scope[_PRINCIPAL] = decision.principal
        return None if decision.refusal is None else _refused(decision)


def principal_of(request: Request) -> Principal:
    principal: Principal = request.scope.get(_PRINCIPAL, OPEN)
    return principal


def require(request: Request, role: Role) -> None:
    """For what the method and path of a request do not show. Raises `ForbiddenError`."""
    if not principal_of(request).may(role):
        raise ForbiddenError(role)


def forbidden(role: Role) -> JSONResponse:
    """The answer to a token whose role is too weak."""
    return problem(
        HTTPStatus.FORBIDDEN,
        code="forbidden",
        detail=f"This needs a token with the role {role}.",
        remedy=f"Create one with `osrdyne token create NAME --role {role}`.",
        role=role,
    )


def _refused(decision: Decision) -> JSONResponse:
    role, refusal = decision.required, decision.refusal
    assert role is not None
    assert refusal is not None
    if refusal is Refusal.FORBIDDEN:
        return forbidden(role)
    answer = problem(
        HTTPStatus.UNAUTHORIZED,
        code="token-required" if refusal is Refusal.NO_TOKEN else "invalid-token",
        detail=f"This needs a token with the role {role}; {refusal.value}.",
        remedy="Send `Authorization: Bearer TOKEN`; the commands of osrdyne take it from OSRDYNE_API_TOKEN or from the "
        "file that OSRDYNE_API_TOKEN_FILE names. `osrdyne token create` makes one.",
        role=role,
    )
    answer.headers["www-authenticate"] = 'Bearer realm="osrdyne"'
    return answer


def access_of(settings: ApiSettings, *, clock: Clock) -> tuple[Access, list[str]]:
    """What the settings allow, and warnings for the log. Raises `ConfigurationError` as `tokens_of` does."""
    tokens, warnings = tokens_of(settings)
    return Access(tokens, clock=clock), warnings
