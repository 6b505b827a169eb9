"""Apply the decisions of `osrdyne.auth` to HTTP requests, and require TLS for keys whose policy demands it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Annotated

from fastapi import Depends, Query, Request
from fastapi.params import Depends as Dependency
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from osrdyne.api.access.authenticators import Authenticators
from osrdyne.api.access.token_file import TokenChange
from osrdyne.api.keys import path_key, query_key
from osrdyne.api.problems import problem, problem_of
from osrdyne.auth.decision import (
    KEYS_RETRY_AFTER,
    AccessRefusal,
    Denial,
    authorize,
    bearer_token,
    check_grant,
    is_loopback,
)
from osrdyne.auth.endpoints import Endpoint, KeysOf, find_endpoint
from osrdyne.auth.grants import ANONYMOUS, LOCAL, OPEN, Grant, Method, Principal, Role
from osrdyne.errors import InvalidKeyError, OsrdyneError, UnprotectedTransportError
from osrdyne.pool.views import ManifestInspector
from osrdyne.protocol.names import Key

_LOCAL = "osrdyne.local"
_PRINCIPAL = "osrdyne.principal"
_PROXIED = "osrdyne.proxied"


class ForbiddenError(OsrdyneError):
    """The grants of the request's principal do not allow the request."""

    def __init__(self, denial: Denial) -> None:
        super().__init__(denial.refusal.value, grant=denial.grant)
        self.denial = denial


class Local:
    """Marks the requests of a listener that only permitted users of this host can reach: the Unix socket."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, _LOCAL: True}, receive, send)


def is_local(request: Request) -> bool:
    """Whether the request came over the Unix socket."""
    return bool(request.scope.get(_LOCAL))


def address_of(scope: Scope) -> str | None:
    """The peer address of the connection of a request."""
    peer = scope.get("client")
    return "unix socket" if scope.get(_LOCAL) else None if peer is None else str(peer[0])


def is_proxied(request: Request) -> bool:
    """Whether the request came through a proxy of `api.trusted_proxies`."""
    return bool(request.scope.get(_PROXIED))


class Access:
    """Decides who may use the API. Without tokens, JWTs and trusted proxies: everyone who can reach it."""

    def __init__(self, authenticators: Authenticators) -> None:
        self._authenticators = authenticators

    async def admit(self, scope: Scope) -> JSONResponse | None:
        """The answer to a refused request; None for a request that may pass. Stores the principal in the scope."""
        endpoint, parts = find_endpoint(scope["method"], scope["path"])
        identified = await self._identify(scope)
        principal = ANONYMOUS if isinstance(identified, AccessRefusal) else identified
        scope[_PRINCIPAL] = principal
        proxies, peer = self._authenticators.proxies, scope.get("client")
        scope[_PROXIED] = proxies is not None and proxies.trusts(None if peer is None else peer[0])
        if isinstance(identified, AccessRefusal):
            # An invalid token is refused on every endpoint, because its sender expects to be identified.
            is_open = endpoint.grant is None and identified is AccessRefusal.NO_TOKEN
            return None if is_open else unauthorized(endpoint.grant, identified)
        if endpoint.grant is None:
            return None
        try:
            # If the grant covers every key, the endpoint refuses an invalid key.
            key = await _key(scope, endpoint, parts) if principal.is_limited(endpoint.grant) else None
        except InvalidKeyError as error:
            return problem_of(error)
        denial = authorize(principal, endpoint, key)
        return None if denial is None else forbidden(denial)

    def take_token_changes(self) -> list[TokenChange]:
        """Changes of the file of API tokens since the last call."""
        tokens = self._authenticators.tokens
        return [] if tokens is None else tokens.take_changes()

    async def _identify(self, scope: Scope) -> Principal | AccessRefusal:
        if scope.get(_LOCAL):
            return LOCAL
        proxies = self._authenticators.proxies
        if self._authenticators.is_open:
            return OPEN
        headers, peer = Headers(scope=scope), scope.get("client")
        presented = bearer_token(headers.getlist("authorization"))
        if presented is AccessRefusal.NO_TOKEN and proxies is not None:
            return proxies.identify(None if peer is None else peer[0], headers.getlist)
        if isinstance(presented, AccessRefusal):
            return presented
        return await self._authenticators.identify(presented)


async def _key(scope: Scope, endpoint: Endpoint, parts: Mapping[str, str]) -> Key | None:
    match endpoint.keys:
        case KeysOf.PATH:
            return await path_key(Request({**scope, "path_params": parts}))
        case KeysOf.QUERY:
            return await query_key(Request(scope))
        case _:
            return None


def principal_of(request: Request) -> Principal:
    return principal_of_scope(request.scope)


def principal_of_scope(scope: Scope) -> Principal:
    principal: Principal = scope.get(_PRINCIPAL, OPEN)
    return principal


async def change_author(
    request: Request,
    author: Annotated[
        str,
        Query(min_length=1, max_length=200, description="Who makes the change, unless the request is authenticated."),
    ],
) -> str:
    """The author of a change: the principal if it is authenticated, otherwise the author that the request claims."""
    return author_or(request, author)


def author_or(request: Request, claimed: str) -> str:
    """The principal of a request if it is authenticated, otherwise the author that it claims."""
    principal = principal_of(request)
    return principal.name if principal.method in {Method.TOKEN, Method.JWT, Method.PROXY} else claimed


Author = Annotated[str, Depends(change_author)]


def require(request: Request, grant: Grant, key: str | None = None) -> None:
    """Check a grant that depends on more than method and path of the request. Raises `ForbiddenError`."""
    denial = check_grant(principal_of(request), grant, key)
    if denial is not None:
        raise ForbiddenError(denial)


def require_keys(request: Request, grant: Grant, keys: Iterable[str] | None) -> None:
    """`require` for each of the keys; None: for all keys of the pool. Raises `ForbiddenError`."""
    if keys is None:
        if principal_of(request).is_limited(grant):
            raise ForbiddenError(Denial(grant, AccessRefusal.ALL_KEYS))
        return
    for key in keys:
        require(request, grant, key)


def forbidden(denial: Denial) -> JSONResponse:
    """The answer to a principal whose grants do not allow the request."""
    grant = denial.grant
    detail = f"This needs the grant {grant}"
    remedies = {
        AccessRefusal.OTHER_KEYS: "Use a token whose pattern of keys covers this key.",
        AccessRefusal.ALL_KEYS: "Name keys that the token covers with key=, where the endpoint takes them, or use a "
        "token for all keys.",
    }
    if denial.refusal is not AccessRefusal.FORBIDDEN:
        detail += f" for other keys than the token has: {denial.refusal.value}"
    return problem(
        HTTPStatus.FORBIDDEN,
        code="forbidden",
        detail=f"{detail}.",
        remedy=remedies.get(denial.refusal, f"Create a token that has it: {_command(grant)}."),
        grant=grant,
    )


def unauthorized(grant: Grant | None, refusal: AccessRefusal) -> JSONResponse:
    """The answer to a request of an unknown sender. `grant` None: the endpoint needs no token."""
    if grant is None:
        answer = problem(
            HTTPStatus.UNAUTHORIZED,
            code="invalid-token",
            detail=f"This needs no token, but the token of the request is not valid: {refusal.value}.",
            remedy="Send the request without `Authorization`, or with a valid token.",
        )
    else:
        answer = problem(
            HTTPStatus.UNAUTHORIZED,
            code="token-required" if refusal is AccessRefusal.NO_TOKEN else "invalid-token",
            detail=f"This needs the grant {grant}; {refusal.value}.",
            remedy="Send `Authorization: Bearer TOKEN`; the commands of osrdyne take it from OSRDYNE_API_TOKEN or from "
            f"the file that OSRDYNE_API_TOKEN_FILE names. {_command(grant)} makes one.",
            grant=grant,
        )
    answer.headers["www-authenticate"] = 'Bearer realm="osrdyne"'
    if refusal is AccessRefusal.KEYS_UNAVAILABLE:
        answer.headers["retry-after"] = str(round(KEYS_RETRY_AFTER))
    return answer


def _command(grant: Grant) -> str:
    role = next((role for role in Role if grant in role.grants), None)
    return f"`osrdyne token create NAME {f'--role {role}' if role else f'--role viewer --grant {grant}'}`"


def is_protected(request: Request) -> bool:
    """Whether the request came over TLS, through a trusted proxy, or from this host: over the Unix socket or from a
    loopback address."""
    if is_local(request) or is_proxied(request) or request.url.scheme == "https":
        return True
    return request.client is not None and is_loopback(request.client.host)


def require_protected(request: Request, inspector: ManifestInspector, keys: Iterable[Key]) -> None:
    """Check TLS for keys that the URL does not name. Raises `UnprotectedTransportError` if the policy of one demands
    TLS and the request came without."""
    if not is_protected(request) and any(inspector.requires_tls(key) for key in keys):
        raise UnprotectedTransportError("The policy of this key demands TLS (TransportProtection: AllPaths).")


def protected(inspector: ManifestInspector, key_of: Callable[[Request], Awaitable[Key]]) -> Dependency:
    """A dependency of the endpoints of one key, which checks TLS. It raises `UnprotectedTransportError`."""

    async def check(request: Request) -> None:
        require_protected(request, inspector, [await key_of(request)])

    dependency: Dependency = Depends(check)
    return dependency
